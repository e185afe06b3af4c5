"""Runs the tests beside this file, and shows what pytest says of each."""

import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent


class Outcomes:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            word = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            print(report.nodeid.partition("::")[2], word)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    words = ["-p", "no:terminal", "-p", "no:cacheprovider", "--rootdir", str(HERE), str(HERE / "test_dangerous.py")]
    print("exit code", int(pytest.main(words, plugins=[Outcomes()])))

# Prints:
# test_on_the_host passed
# test_removes_what_it_can passed
# test_the_next_one_sees_nothing_of_it passed
# test_has_no_network[192.0.2.1] passed
# test_has_no_network[198.51.100.1] passed
# test_fails xfailed
# test_is_skipped skipped
# exit code 0
