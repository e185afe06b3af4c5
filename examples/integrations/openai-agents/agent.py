"""An agent of the OpenAI Agents SDK with a tool that runs Python in a sandbox. The sandbox lives as long as the conversation, so
variables and files stay from call to call."""

import os

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from e2b import CommandExitException, Sandbox
from openai import AsyncOpenAI

set_tracing_disabled(True)
MODEL = OpenAIResponsesModel(os.environ.get("OPENAI_MODEL", "gpt-5"), openai_client=AsyncOpenAI())

with Sandbox.create(timeout=300) as sandbox:

    @function_tool
    def run_python(code: str) -> str:
        """Runs a Python program in an isolated Linux machine, and returns what it prints.

        Args:
            code: The program.
        """
        sandbox.files.write("program.py", code)
        try:
            return sandbox.commands.run("python3 program.py 2>&1", timeout=60).stdout
        except CommandExitException as error:
            # The model gets the error and can repair the program.
            return f"exit code {error.exit_code}\n{error.stdout}"

    agent = Agent(name="analyst", instructions="Compute with run_python.", tools=[run_python], model=MODEL)
    for question in ["What is the mean of 3, 5 and 10?", "Which kernel does the sandbox run?"]:
        result = Runner.run_sync(agent, question)
        outputs = [item.output.strip() for item in result.new_items if item.type == "tool_call_output_item"]
        print(outputs, result.final_output)

# Prints:
# ['6.0'] The mean is 6.0.
# ['Linux'] It runs Linux.
