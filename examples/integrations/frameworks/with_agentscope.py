# /// script
# requires-python = ">=3.11"
# dependencies = ["agentscope[workspace-e2b]==2.0.11"]
# ///
"""AgentScope: its tools with a sandbox as backend. `E2BWorkspace` does more: at the first start it installs packages
from Debian, astral.sh and PyPI, so it needs network access or a template that has them."""

import asyncio

from agentscope.tool import Bash
from agentscope.workspace import E2BBackend
from e2b import AsyncSandbox


async def text(chunks) -> str:
    return "".join([block.text async for chunk in chunks for block in chunk.content]).strip()


async def main() -> None:
    async with await AsyncSandbox.create(timeout=300) as sandbox:
        backend = E2BBackend(sandbox, workdir="/home/user")
        await backend.write_file("/home/user/sum.sh", b"echo $((3 + 5 + 10))\n")
        print(await text(Bash(backend=backend).call(command="sh sum.sh && uname -s")))


asyncio.run(main())

# Prints:
# 18
# Linux
