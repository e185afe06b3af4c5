"""Pauses a sandbox and connects to it again by its id: files, processes and memory are unchanged."""

from e2b import Sandbox

sandbox = Sandbox.create("base", timeout=300)
try:
    sandbox.files.write("notes.txt", "before the pause")
    counter = sandbox.commands.run("for i in $(seq 100000); do echo $i > count; sleep 0.1; done", background=True)
    sandbox.pause()
    print("running:", sandbox.is_running())

    # Any program with the API key can do this, even hours later.
    again = Sandbox.connect(sandbox.sandbox_id, timeout=300)
    print("the same sandbox:", again.sandbox_id == sandbox.sandbox_id)
    print(again.files.read("notes.txt"))
    print("still counting:", counter.pid in [process.pid for process in again.commands.list()])
finally:
    Sandbox.kill(sandbox.sandbox_id)

# Prints:
# running: False
# the same sandbox: True
# before the pause
# still counting: True
