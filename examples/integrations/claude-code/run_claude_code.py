"""Claude Code repairs a program in a sandbox, and goes on after a pause. The key of the model is not in the sandbox."""

import json
import os
import shlex

from e2b import ALL_TRAFFIC, Sandbox, Secret, SecretNotFoundException

TEMPLATE = os.environ.get("CLAUDE_CODE_TEMPLATE", "claude-code")
MODEL = os.environ.get("CLAUDE_CODE_MODEL", "claude-sonnet-5-5")
HOST = "api.anthropic.com"
SECRET = "anthropic"
# Claude Code asks for a login without a key. This one is no key: the rule replaces the header on the way out.
PLACEHOLDER = "replaced-by-the-egress-proxy"
BROKEN = "def total(values):\n    return sum(value)\n\nprint(total([3, 5]))\n"


def store_key() -> None:
    """Stores the key of the environment as a secret, or a new version of it."""
    value = os.environ["ANTHROPIC_API_KEY"]
    try:
        Secret.update(SECRET, value)
    except SecretNotFoundException:
        Secret.create(SECRET, value)


def create() -> Sandbox:
    """One host may be reached, and requests to it get the key."""
    rule = {"transform": {"headers": {"x-api-key": Secret.fill(SECRET)}}}
    return Sandbox.create(
        TEMPLATE,
        timeout=900,
        network={"deny_out": [ALL_TRAFFIC], "allow_out": [HOST], "rules": {HOST: [rule]}},
        envs={
            "ANTHROPIC_API_KEY": PLACEHOLDER,
            # Updates, error reports and telemetry go to hosts that the policy does not allow.
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def prompt(sandbox: Sandbox, text: str, *options: str) -> list[dict]:
    """Runs one prompt and returns the events. Each line of the output is one."""
    words = ["claude", "--print", "--output-format", "stream-json", "--verbose", "--model", MODEL]
    words += ["--allowedTools", "Bash,Edit,Read", *options, "--", text]
    done = sandbox.commands.run("cd /workspace && " + shlex.join(words) + " < /dev/null", timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tools(events: list[dict]) -> list[str]:
    """The names of the tools that were used."""
    messages = [event["message"]["content"] for event in events if event["type"] == "assistant"]
    return [part["name"] for content in messages for part in content if part["type"] == "tool_use"]


def said(events: list[dict]) -> str:
    return next(event["result"] for event in reversed(events) if event["type"] == "result")


if __name__ == "__main__":
    store_key()
    sandbox = create()
    sandbox.files.write("/workspace/total.py", BROKEN)
    events = prompt(sandbox, "total.py fails. Find out why and repair it.")
    print("tools:", *tools(events))
    print("claude:", said(events))
    print("total.py prints", sandbox.commands.run("python3 /workspace/total.py").stdout.strip())
    print("key in the sandbox:", sandbox.commands.run("printenv ANTHROPIC_API_KEY").stdout.strip())
    sandbox.pause()
    # Any program with a key of the server can go on later, by the id. Rules and files are kept.
    sandbox = Sandbox.connect(sandbox.sandbox_id)
    print("after a pause:", said(prompt(sandbox, "In which line was it?", "--continue")))
    sandbox.kill()

# Prints:
# tools: Bash Read Edit Bash
# claude: The name was misspelt: `value` is now `values`, and the program prints 8.
# total.py prints 8
# key in the sandbox: replaced-by-the-egress-proxy
# after a pause: It was in line 2.
