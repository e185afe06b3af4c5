"""Tests the server's OpenAPI document with requests that schemathesis generates from it."""

import os
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from . import Absent, Cases

CASES = Cases()
case = CASES

SUITE = Path(__file__).parents[1]
# A separate environment, next to the SDK's.
PYTHON = SUITE.parents[1] / "schemathesis/bin/python"
CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"


@case
def openapi_document():
    if version("e2b") == "2.45.1":
        raise Absent("one SDK is enough: the case uses none")
    # The suite's second server, so that objects created here do not disturb other cases.
    url = os.environ["CONFORMANCE_HTTPS_URL"]
    command = [PYTHON, "-m", "schemathesis.cli", "--config-file", SUITE / "schemathesis.toml", "run", f"{url}/openapi.json"]
    command += ["--url", url, "--header", f"X-API-KEY: {os.environ['CONFORMANCE_HTTPS_KEY']}"]
    command += ["--tls-verify", os.environ["CONFORMANCE_HTTPS_CA"], "--checks", CHECKS]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--max-time", "45"]
    # A drained node would reject the creates of other cases.
    command += ["--exclude-path", "/nodes/{id}"]
    command += ["--request-timeout", "10", "--warnings", "off", "--no-color", "--generation-database", "none"]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        report = done.stdout[done.stdout.find("FAILURES"):]
        raise AssertionError(report[:700] or done.stderr[-700:])
