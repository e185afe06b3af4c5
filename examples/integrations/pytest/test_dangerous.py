"""Tests that nobody should run on the own machine, and one that runs there."""

import os
import pathlib
import shutil
import socket

import pytest

pytest_plugins = ["cube_sandboxed"]


def test_on_the_host():
    assert "CUBE_SANDBOXED" not in os.environ


@pytest.mark.sandboxed
def test_removes_what_it_can():
    shutil.rmtree("/home/user", ignore_errors=True)
    assert not list(pathlib.Path("/home/user/project").glob("*"))


@pytest.mark.sandboxed
def test_the_next_one_sees_nothing_of_it(tmp_path):
    (tmp_path / "file").write_text("text")
    assert pathlib.Path("/home/user/project/test_dangerous.py").exists()


@pytest.mark.sandboxed
@pytest.mark.parametrize("host", ["192.0.2.1", "198.51.100.1"])
def test_has_no_network(host):
    with pytest.raises(OSError):
        socket.create_connection((host, 443), timeout=2)


@pytest.mark.sandboxed
@pytest.mark.xfail(strict=True, reason="a failure has its traceback")
def test_fails():
    assert 6 * 7 == 41


@pytest.mark.sandboxed
@pytest.mark.skipif("CUBE_SANDBOXED" in os.environ, reason="skipped in the sandbox")
def test_is_skipped():
    raise AssertionError
