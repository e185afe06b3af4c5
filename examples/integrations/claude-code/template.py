"""Builds the template `claude-code`: the root image `base` and the program of the pinned package.

    python template.py                   the build's machine gets it from the npm registry
    python template.py --packages DIR    DIR/node_modules is there: for servers whose builds reach no registry
"""

import argparse
import os

from e2b import Template

NAME = os.environ.get("CLAUDE_CODE_TEMPLATE", "claude-code")
# The package for this platform has one program, which needs no Node; `@anthropic-ai/claude-code` only finds it.
PACKAGE = "@anthropic-ai/claude-code-linux-x64"
VERSION = "2.1.332"
HOME = "/opt/claude-code"


def from_registry() -> Template:
    return (
        Template()
        .from_base_image()
        .set_user("root")
        .make_dir(HOME)
        .set_workdir(HOME)
        .run_cmd(f"npm install --no-audit --no-fund --ignore-scripts {PACKAGE}@{VERSION}")
        .run_cmd(f"mv node_modules/{PACKAGE}/claude {HOME}/claude && rm -r node_modules")
    )


def from_packages(directory: str) -> Template:
    return (
        Template(file_context_path=directory)
        .from_base_image()
        .set_user("root")
        .copy(f"node_modules/{PACKAGE}/claude", f"{HOME}/claude", mode=0o755)
    )


def finished(template: Template) -> Template:
    return (
        template.run_cmd(f"ln -s {HOME}/claude /usr/local/bin/claude")
        .run_cmd("mkdir -p /workspace && chmod 0777 /workspace")
        # The version is in the log, and a program that does not start fails the build.
        .run_cmd("claude --version")
        .set_user("user")
        .set_workdir("/workspace")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages")
    packages = parser.parse_args().packages
    origin = from_packages(packages) if packages else from_registry()
    built = Template.build(finished(origin), NAME, memory_mb=1024)
    print("template", built.name)

# Prints:
# template claude-code
