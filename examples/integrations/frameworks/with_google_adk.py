# /// script
# requires-python = ">=3.11"
# dependencies = ["google-adk[e2b,openai]==2.13.0"]
# ///
"""Google's Agent Development Kit: an agent whose environment is a sandbox."""

import asyncio
import os

from google.adk.agents import Agent
from google.adk.integrations.e2b import E2BEnvironment
from google.adk.integrations.openai import OpenAILlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.environment import EnvironmentToolset


async def main() -> None:
    environment = E2BEnvironment(timeout=300)
    model = OpenAILlm(model=os.environ.get("OPENAI_MODEL", "gpt-5"))
    agent = Agent(name="shell", model=model, tools=[EnvironmentToolset(environment=environment)])
    try:
        events = await InMemoryRunner(agent).run_debug("Run uname with Execute.", quiet=True)
    finally:
        await environment.close()
    parts = [part for event in events for part in event.content.parts]
    print([part.function_response.response for part in parts if part.function_response])
    print("".join(part.text for part in parts if part.text))


asyncio.run(main())

# Prints:
# [{…Linux…}]
# It runs Linux.
