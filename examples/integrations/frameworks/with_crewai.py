# /// script
# requires-python = ">=3.10"
# dependencies = ["crewai-tools==1.15.30", "e2b-code-interpreter==2.11.5"]
# ///
"""crewai-tools: what an agent's tools return, without a model. A tool with `persistent=True` keeps its sandbox.
The extra `e2b` of crewai-tools installs SDKs that ignore E2B_SANDBOX_URL for code; newer ones work."""

import os

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")

from crewai_tools import E2BExecTool, E2BPythonTool

print(E2BExecTool().run(command="uname -s")["stdout"].strip())
python = E2BPythonTool(persistent=True)
python.run(code="rows = [3, 5, 10]")
print(python.run(code="sum(rows) / len(rows)")["text"])
python.close()

# Prints:
# Linux
# 6.0
