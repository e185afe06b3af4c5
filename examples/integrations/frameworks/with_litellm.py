# /// script
# requires-python = ">=3.10"
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM's code interpreter. It does not use E2B's SDK: it takes the server's address as `api_base`, and sends code to
`https://49999-<id>.<domain>`, so the server needs a domain with TLS. Here, `Door` sends it to E2B_SANDBOX_URL instead."""

import asyncio
import os

# Otherwise the import fetches a list of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import httpx
import litellm
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler


class Door(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        port, _, sandbox = request.url.host.split(".")[0].partition("-")
        if port.isdigit() and sandbox:
            door = httpx.URL(os.environ["E2B_SANDBOX_URL"])
            request.url = request.url.copy_with(scheme=door.scheme, host=door.host, port=door.port)
            request.headers.update({"Host": door.netloc.decode(), "E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": port})
        return await super().handle_async_request(request)


async def main() -> None:
    handler = AsyncHTTPHandler(timeout=60)
    handler.client = httpx.AsyncClient(transport=Door(), timeout=60)
    done = await litellm.acode_interpreter_tool(
        provider="e2b", code="print(sum([3, 5, 10]) / 3)", api_base=os.environ["E2B_API_URL"], client=handler
    )
    print(done.stdout.strip(), done.error)


asyncio.run(main())

# Prints:
# 6.0 None
