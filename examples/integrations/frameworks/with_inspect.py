# /// script
# requires-python = ">=3.12"
# dependencies = ["inspect-ai==0.3.285", "inspect-sandboxes==0.6.1", "modal==1.5.4"]
# ///
"""Inspect with the sandbox `e2b` of inspect-sandboxes. Inspect's own stand-in for a model calls the tool `bash` once.
inspect-sandboxes loads the packages of all its providers, and fails with modal 1.6."""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

OUTPUTS = [
    ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "echo $((3 + 5 + 10))"}),
    ModelOutput.from_content("mockllm/model", "The sum is 18."),
]
for output in OUTPUTS:
    # Otherwise Inspect counts tokens, and fetches a table for this.
    output.usage = ModelUsage()

task = Task(
    dataset=[Sample("What is the sum of 3, 5 and 10?", target="18")],
    solver=[use_tools(bash(timeout=60)), generate()],
    scorer=includes(),
    # The template is `base`. A compose file names another one: `x-e2b: {template: NAME}`.
    sandbox="e2b",
)
with tempfile.TemporaryDirectory() as logs:
    [log] = eval(task, model=get_model("mockllm/model", custom_outputs=OUTPUTS), display="none", log_dir=logs)
    if log.status != "success":
        raise SystemExit(log.error.message if log.error else log.status)
    [sample] = log.samples
    print([message.text.strip() for message in sample.messages if message.role == "tool"], sample.output.completion)
    print("accuracy", log.results.scores[0].metrics["accuracy"].value)

# Prints:
# ['18'] The sum is 18.
# accuracy 1.0
