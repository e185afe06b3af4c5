"""An environment for mini-swe-agent whose commands run in a sandbox.

Differences from the environment `e2b` that mini-swe-agent has: it takes a template instead of an image, a command that fails
has its exit code and output instead of an exception, and an environment can be forked: each rollout of a task begins with the
memory and the disk of the same prepared sandbox.

On the command line: `mini --environment-class cube_environment.CubeEnvironment`, with this directory in PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

from e2b import CommandExitException, Sandbox, TimeoutException
from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class CubeEnvironmentConfig(BaseModel):
    template: str = "base"
    cwd: str = "/home/user"
    env: dict[str, str] = {}
    timeout: int = 30
    """Seconds for a command."""
    sandbox_timeout: int = 3600
    """Seconds until the sandbox ends by itself."""
    network: dict[str, Any] = {}
    """Options of `Sandbox.create`; empty: what the server gives, which is nothing unless it was told otherwise."""


class CubeEnvironment:
    def __init__(self, *, sandbox: Sandbox | None = None, **settings: Any):
        self.config = CubeEnvironmentConfig(**settings)
        self.sandbox = sandbox or Sandbox.create(
            self.config.template,
            timeout=self.config.sandbox_timeout,
            network=self.config.network or None,
        )

    def fork(self, count: int) -> list[CubeEnvironment]:
        """Environments that go on from here, for rollouts. Raises the first error, and ends the others then."""
        forks: list[Any] = []
        while len(forks) < count:
            # The interface makes at most 20 at a time.
            forks += self.sandbox.fork(timeout=self.config.sandbox_timeout, count=min(20, count - len(forks)))
        failed = [fork for fork in forks if isinstance(fork, Exception)]
        if failed:
            for fork in forks:
                if isinstance(fork, Sandbox):
                    fork.kill()
            raise failed[0]
        return [CubeEnvironment(sandbox=fork, **self.config.model_dump()) for fork in forks]

    def execute(self, action: dict | str, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        command = action if isinstance(action, str) else action.get("command", "")
        limit = timeout or self.config.timeout
        try:
            # In one stream, as in a terminal.
            done = self.sandbox.commands.run(
                f"{{ {command}\n}} 2>&1", cwd=cwd or self.config.cwd, envs=self.config.env, timeout=limit
            )
            output = {"output": done.stdout, "returncode": 0, "exception_info": ""}
        except CommandExitException as error:
            output = {"output": error.stdout, "returncode": error.exit_code, "exception_info": ""}
        except TimeoutException as error:
            output = {
                "output": "",
                "returncode": -1,
                "exception_info": f"The command did not end within {limit} s and was killed.",
                "extra": {"exception_type": type(error).__name__, "exception": str(error)},
            }
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT and output["returncode"] == 0:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return output

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        guest = {"system": "Linux", "machine": "x86_64", "release": "", "version": ""}
        return recursive_merge(self.config.model_dump(), guest, more)

    def serialize(self) -> dict:
        config = {
            "environment": self.config.model_dump(mode="json"),
            "environment_type": f"{type(self).__module__}.{type(self).__name__}",
        }
        return {"info": {"config": config}}

    def stop(self) -> None:
        self.sandbox.kill()

    def __enter__(self) -> CubeEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
