# /// script
# requires-python = ">=3.10"
# dependencies = ["langchain==1.5.0", "langchain-openai==1.7.4", "e2b==2.63.0"]
# ///
"""An agent of LangChain with a tool that runs Python in a sandbox."""

import os

from e2b import CommandExitException, Sandbox
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

with Sandbox.create(timeout=300) as sandbox:

    @tool
    def run_python(code: str) -> str:
        """Runs a Python program in an isolated Linux machine, and returns what it prints."""
        sandbox.files.write("program.py", code)
        try:
            return sandbox.commands.run("python3 program.py 2>&1", timeout=60).stdout
        except CommandExitException as error:
            return f"exit code {error.exit_code}\n{error.stdout}"

    model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-5"))
    agent = create_agent(model, tools=[run_python], system_prompt="Compute with run_python.")
    for question in ["What is the mean of 3, 5 and 10?", "Which kernel does the sandbox run?"]:
        messages = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"]
        outputs = [message.content.strip() for message in messages if message.type == "tool"]
        print(outputs, messages[-1].content)

# Prints:
# ['6.0'] The mean is 6.0.
# ['Linux'] It runs Linux.
