# /// script
# requires-python = ">=3.10"
# dependencies = ["agno[openai]==3.1.10", "e2b-code-interpreter==2.11.5"]
# ///
"""agno: an agent with `E2BTools`, whose sandbox has the template `code-interpreter-v1`."""

import os

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from agno.tools.e2b import E2BTools

tools = E2BTools(timeout=300)
try:
    model = OpenAIChat(id=os.environ.get("OPENAI_MODEL", "gpt-5"))
    agent = Agent(model=model, tools=[tools], telemetry=False)
    run = agent.run("Compute the mean of 3, 5 and 10 with run_python_code.")
    print([tool.result for tool in run.tools], run.content)
finally:
    tools.shutdown_sandbox()

# Prints:
# […6.0…] The mean is 6.0.
