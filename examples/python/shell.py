"""Shell commands: pipes, variables, streamed output, failures, and a server in the background."""

from e2b import CommandExitException, Sandbox

with Sandbox.create("base", timeout=300) as sandbox:
    sorted_words = sandbox.commands.run("printf 'pear\\napple\\nfig\\n' | sort | head -n 2").stdout
    print(sorted_words.split())

    greeting = sandbox.commands.run("echo $GREETING from $PWD", envs={"GREETING": "hi"}, cwd="/tmp")
    print(greeting.stdout.strip())

    lines = []
    sandbox.commands.run("for i in 1 2 3; do echo line $i; done", on_stdout=lines.append)
    print("".join(lines).splitlines())

    try:
        sandbox.commands.run("ls /nowhere")
    except CommandExitException as error:
        print("failed with", error.exit_code, "and said why:", "/nowhere" in error.stderr)

    server = sandbox.commands.run("python3 -m http.server 8000", background=True)
    page = sandbox.commands.run("curl -s --retry 20 --retry-connrefused --retry-delay 1 -o /dev/null -w '%{http_code}' localhost:8000")
    print("server answers", page.stdout)
    print("server ended:", server.kill())

# Prints:
# ['apple', 'fig']
# hi from /tmp
# ['line 1', 'line 2', 'line 3']
# failed with 2 and said why: True
# server answers 200
# server ended: True
