"""Claude Code in a sandbox. The key of the model is not in the sandbox.

    python run_claude_code.py                   the template installs the package from the npm registry
    python run_claude_code.py --packages DIR    DIR/node_modules is copied: for servers whose builds reach no registry
"""

import argparse
import json
import os
import shlex

from e2b import ALL_TRAFFIC, Sandbox, Secret, SecretNotFoundException, Template

NAME, HOST, SECRET = "claude-code", "api.anthropic.com", "anthropic"
VERSION = "2.1.332"
BINARY = "node_modules/@anthropic-ai/claude-code-linux-x64/claude"


def template(packages: str | None) -> Template:
    if packages:
        begin = Template(file_context_path=packages).from_base_image().set_user("root")
        begin = begin.copy(BINARY, "/opt/claude-code/claude", mode=0o755)
        link = "ln -s /opt/claude-code/claude /usr/local/bin/claude"
    else:
        begin = Template().from_base_image().set_user("root").make_dir("/opt/claude-code").set_workdir("/opt/claude-code")
        begin = begin.run_cmd(f"npm install --no-audit --no-fund --ignore-scripts @anthropic-ai/claude-code@{VERSION}")
        link = f"ln -s /opt/claude-code/{BINARY} /usr/local/bin/claude"
    return (
        begin.run_cmd(link)
        .run_cmd("mkdir -p /workspace && chmod 0777 /workspace")
        .run_cmd("claude --version")
        .set_user("user")
        .set_workdir("/workspace")
    )


parser = argparse.ArgumentParser()
parser.add_argument("--packages")
Template.build(template(parser.parse_args().packages), NAME, memory_mb=2048)
try:
    Secret.update(SECRET, os.environ["ANTHROPIC_API_KEY"])
except SecretNotFoundException:
    Secret.create(SECRET, os.environ["ANTHROPIC_API_KEY"])

network = {
    "deny_out": [ALL_TRAFFIC],
    "allow_out": [HOST],
    "rules": {HOST: [{"transform": {"headers": {"x-api-key": Secret.fill(SECRET)}}}]},
}
envs = {
    # No key: the rule replaces the header on the way out.
    "ANTHROPIC_API_KEY": "replaced-by-the-egress-proxy",
    # Updates, telemetry and error reports go to hosts that the policy denies.
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}
with Sandbox.create(NAME, timeout=600, network=network, envs=envs) as sandbox:
    prompt = "Create the file hello.txt that greets."
    words = ["claude", "--print", prompt, "--output-format", "json", "--permission-mode", "acceptEdits"]
    done = sandbox.commands.run("cd /workspace && " + shlex.join(words) + " < /dev/null", timeout=300)
    print("claude:", json.loads(done.stdout)["result"])
    print("hello.txt:", sandbox.files.read("/workspace/hello.txt").strip())

# Prints:
# claude: I created hello.txt.
# hello.txt: hello from Claude Code
