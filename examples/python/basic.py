"""Creates a sandbox, runs a command in it, and kills it."""

from e2b import Sandbox

with Sandbox.create("base", timeout=300) as sandbox:
    result = sandbox.commands.run("echo 'hello from' $(whoami); uname -s")
    print(result.stdout, end="")
    print("status", result.exit_code)
print("still running:", sandbox.is_running())

# Prints:
# hello from user
# Linux
# status 0
# still running: False
