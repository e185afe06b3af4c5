"""Pauses the sandbox between two prompts, and goes on with Pi's session as it was."""

from e2b import Sandbox
from pi_sandbox import create, prompt, said, store_key

store_key()
sandbox = create()
first = prompt(sandbox, "Remember the number 42.")
print("before:", said(first))
sandbox.pause()

# Any program with a key of the server can go on later, by the id. Rules and files are kept.
sandbox = Sandbox.connect(sandbox.sandbox_id)
second = prompt(sandbox, "Which number was it?", "--continue")
print("after:", said(second))
sandbox.kill()

# Prints:
# before: I will remember 42.
# after: It was 42.
