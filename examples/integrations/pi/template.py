"""Builds the template `pi`: the root image `base`, Node and the pinned package.

    python template.py                   the build's machine gets both from the npm registry
    python template.py --packages DIR    DIR/node (a Node of 22.19 or later) and DIR/node_modules are copied: for servers
                                         whose builds reach no registry
"""

import argparse
import os

from e2b import Template

NAME = os.environ.get("PI_TEMPLATE", "pi")
PACKAGE = "@earendil-works/pi-coding-agent"
VERSION = "1.5.2"
NODE = "24.19.0"
HOME = "/opt/pi"


def from_registry() -> Template:
    # Debian's Node is older than Pi needs. `node` of the npm registry has the binary in a package for each platform.
    return (
        Template()
        .from_base_image()
        .set_user("root")
        .make_dir(HOME)
        .set_workdir(HOME)
        .run_cmd(f"npm install --no-audit --no-fund node@{NODE}")
        .run_cmd(f"npm install --no-audit --no-fund --ignore-scripts {PACKAGE}@{VERSION}")
        .run_cmd(f"ln -s {HOME}/node_modules/node/bin/node {HOME}/node")
    )


def from_packages(directory: str) -> Template:
    return (
        Template(file_context_path=directory)
        .from_base_image()
        .set_user("root")
        .copy("node", f"{HOME}/node", mode=0o755)
        .copy("node_modules", f"{HOME}/node_modules")
    )


def finished(template: Template) -> Template:
    launcher = f'#!/bin/sh\\nexec {HOME}/node {HOME}/node_modules/{PACKAGE}/dist/bundle/cli.js "$@"\\n'
    return (
        template.run_cmd(f"printf '{launcher}' > /usr/local/bin/pi && chmod 0755 /usr/local/bin/pi")
        .run_cmd("mkdir -p /workspace && chmod 0777 /workspace")
        # The version is in the log, and a package that does not start fails the build.
        .run_cmd("pi --version")
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
# template pi
