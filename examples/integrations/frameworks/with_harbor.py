# /// script
# requires-python = ">=3.12"
# dependencies = ["harbor[e2b]==0.26.0"]
# ///
"""Harbor, the runner of Terminal-Bench. Its agent `oracle` runs the task's own solution, so no model is needed, and the
task's tests write the reward. The template is given: Harbor names one that it builds by its build, which the server
refuses with 404."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Write the sum of 3, 5 and 10 to /sum.\n",
    "environment/Dockerfile": "FROM e2bdev/base\n",
    "solution/solve.sh": "#!/bin/bash\necho $((3 + 5 + 10)) > /sum\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /sum)" = 18 ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n',
}

with tempfile.TemporaryDirectory() as directory:
    task, jobs = Path(directory, "sum"), Path(directory, "jobs")
    for name, text in TASK.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    harbor = [Path(sys.executable).with_name("harbor"), "run", "--path", task, "--jobs-dir", jobs, "--quiet", "--yes"]
    subprocess.run(
        [*harbor, "--agent", "oracle", "--env", "e2b", "--ek", "prebuilt_template_id=base"],
        env={**os.environ, "HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=sys.stderr,
        check=True,
    )
    for path in jobs.glob("*/*/result.json"):
        trial = json.loads(path.read_text())
        print(trial["task_name"], trial["verifier_result"]["rewards"], trial["exception_info"])

# Prints:
# sum {'reward': 1.0} None
