"""Builds a template with a program of its own, and runs the program in a sandbox."""

from e2b import Sandbox, Template

template = (
    Template()
    .from_base_image()
    .set_workdir("/home/user/app")
    .run_cmd("echo 'print(6 * 7)' > answer.py")
)
built = Template.build(template, "own-template-python", cpu_count=1, memory_mb=512)
print(built.name)
with Sandbox.create("own-template-python", timeout=60) as sandbox:
    print(sandbox.commands.run("pwd; python answer.py").stdout, end="")

# Prints:
# own-template-python
# /home/user/app
# 42
