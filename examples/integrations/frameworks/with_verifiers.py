# /// script
# requires-python = ">=3.11"
# dependencies = ["verifiers[e2b]==0.4.0"]
# ///
"""verifiers. `vf-validate` checks tasks without a model, each in two sandboxes: the reference answer must be right, and
an untouched task must get no reward. The taskset is this file."""

import json
import sys
import tempfile
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.cli import validate


class SumTask(vf.Task[vf.TaskData]):
    async def validate(self, runtime: vf.Runtime) -> bool:
        await runtime.run(["sh", "-c", "echo $((3 + 5 + 10)) > sum"], {})
        return await self.is_right(runtime) == 1.0

    @vf.reward(weight=1.0)
    async def is_right(self, runtime: vf.Runtime) -> float:
        done = await runtime.run(["grep", "-qx", "18", "sum"], {})
        return float(done.exit_code == 0)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        # verifiers builds a template from the image. Its default, python:3.11-slim, needs a registry.
        yield SumTask(vf.TaskData(prompt="Write the sum of 3, 5 and 10 to the file sum.", image="e2bdev/base"))


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        stdout, sys.stdout = sys.stdout, sys.stderr
        validate.main(["with_verifiers", "--runtime.type", "e2b", "--no-rich", "--output-dir", directory])
        [summary] = Path(directory).glob("*/summary.json")
        checks = json.loads(summary.read_text())["checks"]
    print("reference answer is right:", checks["gold"]["valid"], file=stdout)
    print("untouched task gets no reward:", checks["noop"]["valid"], file=stdout)

# Prints:
# reference answer is right: 1
# untouched task gets no reward: 1
