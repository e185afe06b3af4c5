"""Pi repairs a program in a sandbox. The key of the model is not in the sandbox."""

from pi_sandbox import create, prompt, said, store_key, tools

BROKEN = "def mean(values):\n    return sum(values) / len(value)\n\nprint(mean([3, 5]))\n"

store_key()
with create() as sandbox:
    sandbox.files.write("/workspace/mean.py", BROKEN)
    events = prompt(sandbox, "mean.py fails. Find out why and repair it.")
    print("tools:", *tools(events))
    print("pi:", said(events))
    print("mean.py prints", sandbox.commands.run("python3 /workspace/mean.py").stdout.strip())
    print("key in the sandbox:", sandbox.commands.run("printenv ANTHROPIC_API_KEY").stdout.strip())

# Prints:
# tools: bash edit bash
# pi: The name was misspelt: `value` is now `values`, and the program prints 4.0.
# mean.py prints 4.0
# key in the sandbox: replaced-by-the-egress-proxy
