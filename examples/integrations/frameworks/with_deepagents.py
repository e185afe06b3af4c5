# /// script
# requires-python = ">=3.11"
# dependencies = ["deepagents==0.6.12", "langchain-e2b==0.0.6", "langchain-openai==1.7.4"]
# ///
"""Deep Agents of LangChain, with a sandbox as backend for its shell and file tools."""

import os

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_e2b import E2BSandbox
from langchain_openai import ChatOpenAI

with Sandbox.create(timeout=300) as sandbox:
    model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-5"))
    agent = create_deep_agent(model=model, backend=E2BSandbox(sandbox=sandbox))
    messages = agent.invoke({"messages": [{"role": "user", "content": "Run uname with execute."}]})["messages"]
    print([message.content for message in messages if message.type == "tool"], messages[-1].content)

# Prints:
# ['Linux\n…'] It runs Linux.
