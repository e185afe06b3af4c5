"""What the programs beside this one share: a sandbox for Pi, a prompt, and Pi's events."""

import json
import os
import shlex

from e2b import ALL_TRAFFIC, Sandbox, Secret, SecretNotFoundException

TEMPLATE = os.environ.get("PI_TEMPLATE", "pi")
MODEL = os.environ.get("PI_MODEL", "claude-sonnet-5-5")
HOST = "api.anthropic.com"
SECRET = "anthropic"
# Pi does not start without a key. This one is no key: the rule replaces the header on the way out.
PLACEHOLDER = "replaced-by-the-egress-proxy"


def store_key() -> None:
    """Stores the key of the environment as a secret, or a new version of it."""
    value = os.environ["ANTHROPIC_API_KEY"]
    try:
        Secret.update(SECRET, value)
    except SecretNotFoundException:
        Secret.create(SECRET, value)


def network() -> dict:
    """One host may be reached, and requests to it get the key."""
    return {
        "deny_out": [ALL_TRAFFIC],
        "allow_out": [HOST],
        "rules": {HOST: [{"transform": {"headers": {"x-api-key": Secret.fill(SECRET)}}}]},
    }


def create(**options) -> Sandbox:
    return Sandbox.create(
        TEMPLATE,
        timeout=600,
        network=network(),
        envs={"ANTHROPIC_API_KEY": PLACEHOLDER, "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        **options,
    )


def prompt(sandbox: Sandbox, text: str, *options: str) -> list[dict]:
    """Runs Pi once and returns its events. Each line of its output is one."""
    words = ["pi", "--print", "--mode", "json", "--provider", "anthropic", "--model", MODEL, *options, text]
    done = sandbox.commands.run("cd /workspace && " + shlex.join(words) + " < /dev/null", timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tools(events: list[dict]) -> list[str]:
    """The names of the tools that Pi has run."""
    return [event["toolName"] for event in events if event["type"] == "tool_execution_start"]


def said(events: list[dict]) -> str:
    """The last text of the model."""
    for event in reversed(events):
        message = event.get("message", {})
        if event["type"] != "message_end" or message.get("role") != "assistant":
            continue
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        if texts:
            return texts[-1]
    return ""
