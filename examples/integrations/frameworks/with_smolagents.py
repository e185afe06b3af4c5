# /// script
# requires-python = ">=3.10"
# dependencies = ["smolagents[e2b,openai]==1.26.0"]
# ///
"""smolagents: a `CodeAgent` whose code runs in a sandbox of the template `code-interpreter-v1`."""

import os

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel(model_id=os.environ.get("OPENAI_MODEL", "gpt-5"), api_base=os.environ.get("OPENAI_BASE_URL"))
with CodeAgent(tools=[], model=model, executor_type="e2b", verbosity_level=0) as agent:
    print(agent.run("Compute the mean of 3, 5 and 10 with code."))

# Prints:
# 6.0
