"""mini-swe-agent repairs a repository in a sandbox, and the patch that it submits is tested in a fresh fork."""

import os

os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

from cube_environment import CubeEnvironment
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.litellm_model import LitellmModel

MODEL = os.environ.get("SWE_MODEL", "openai/gpt-5")
PREPARE = """
git init -q . && git config user.email a@b.test && git config user.name a
printf 'def add(a, b):\\n    return a - b\\n' > add.py
printf 'from add import add\\nassert add(2, 3) == 5\\n' > test_add.py
git add . && git commit -qm begin
"""
SYSTEM = "You repair programs. Work with the tool bash."
TASK = "{{task}} When the test passes, print COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT and the diff."

with CubeEnvironment(cwd="/home/user/repo") as prepared:
    prepared.execute("mkdir -p repo", cwd="/home/user")
    print("prepared:", prepared.execute(PREPARE)["returncode"])
    rollout, judge = prepared.fork(2)
    with rollout, judge:
        model = LitellmModel(model_name=MODEL)
        agent = DefaultAgent(model, rollout, system_template=SYSTEM, instance_template=TASK, step_limit=10)
        result = agent.run("Repair add.py so that test_add.py passes.")
        patch = result["submission"]
        print(result["exit_status"], "after", sum(m["role"] == "assistant" for m in agent.messages), "calls of the model")
        print([line for line in patch.splitlines() if line.startswith(("+ ", "- "))])
        print("before:", judge.execute("python3 test_add.py 2>&1 | tail -1")["output"].strip())
        judge.sandbox.files.write("/tmp/patch", patch)
        print("after:", judge.execute("git apply /tmp/patch && python3 test_add.py")["returncode"])

# Prints:
# prepared: 0
# Submitted after 3 calls of the model
# ['-    return a - b', '+    return a + b']
# before: AssertionError
# after: 0
