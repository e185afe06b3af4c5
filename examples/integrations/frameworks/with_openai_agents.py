# /// script
# requires-python = ">=3.10"
# dependencies = ["openai-agents[e2b]==0.24.0"]
# ///
"""OpenAI Agents SDK: an agent with a tool that runs Python in a session of the SDK's sandbox client for E2B. The session
lives as long as the conversation, so files stay from call to call."""

import asyncio
import os

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from openai import AsyncOpenAI

# The SDK otherwise sends traces to OpenAI.
set_tracing_disabled(True)
MODEL = OpenAIResponsesModel(os.environ.get("OPENAI_MODEL", "gpt-5"), openai_client=AsyncOpenAI())
# `delete` of the client does nothing, and by default a sandbox is paused at its timeout: the end of the session kills it.
OPTIONS = E2BSandboxClientOptions(sandbox_type="e2b", timeout=300, on_timeout="kill", allow_internet_access=False)


async def main() -> None:
    async with await E2BSandboxClient().create(options=OPTIONS) as session:

        @function_tool
        async def run_python(code: str) -> str:
            """Runs a Python program in an isolated Linux machine, and returns what it prints.

            Args:
                code: The program.
            """
            done = await session.exec("python3", "-c", code, timeout=60, shell=False)
            # The model gets the error and can repair the program.
            return (done.stdout + done.stderr).decode()

        agent = Agent(name="analyst", instructions="Compute with run_python.", tools=[run_python], model=MODEL)
        for question in ["What is the mean of 3, 5 and 10?", "Which kernel does the sandbox run?"]:
            result = await Runner.run(agent, question)
            outputs = [item.output.strip() for item in result.new_items if item.type == "tool_call_output_item"]
            print(outputs, result.final_output)


asyncio.run(main())

# Prints:
# ['6.0'] The mean is 6.0.
# ['Linux'] It runs Linux.
