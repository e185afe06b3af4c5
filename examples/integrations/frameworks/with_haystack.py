# /// script
# requires-python = ">=3.11"
# dependencies = ["haystack-ai==3.4.1", "e2b-haystack==2.0.0"]
# ///
"""Haystack: an agent with `E2BToolset`, whose tools share a sandbox."""

import os

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack_integrations.tools.e2b import E2BToolset

tools = E2BToolset(timeout=300)
try:
    model = OpenAIChatGenerator(model=os.environ.get("OPENAI_MODEL", "gpt-5"))
    question = ChatMessage.from_user("Run uname with run_bash_command.")
    messages = Agent(chat_generator=model, tools=tools).run(messages=[question])["messages"]
    print([message.tool_call_result.result for message in messages if message.tool_call_result], messages[-1].text)
finally:
    tools.close()

# Prints:
# ['exit_code: 0\nstdout:\nLinux\n\nstderr:\n'] It runs Linux.
