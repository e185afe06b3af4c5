"""Registration of cases, and helpers that create sandboxes and compare results."""

import asyncio
import inspect
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from e2b import Sandbox

TEMPLATE = os.environ.get("CONFORMANCE_TEMPLATE", "base")


class Absent(Exception):
    """This SDK lacks the feature."""


@dataclass
class Case:
    name: str
    function: Callable[[], Any]

    def run(self) -> None:
        result = self.function()
        if inspect.iscoroutine(result):
            asyncio.run(result)


class Cases:
    """The cases of one area, in the order of their definition."""

    def __init__(self) -> None:
        self.all: list[Case] = []

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.all.append(Case(function.__name__.replace("_", "-"), function))
        return function


@contextmanager
def sandbox(**options: Any) -> Iterator[Sandbox]:
    options.setdefault("timeout", 120)
    made = Sandbox.create(options.pop("template", TEMPLATE), **options)
    try:
        yield made
    finally:
        Sandbox.kill(made.sandbox_id)


def until(what: str, condition: Callable[[], Any], within: float = 10.0) -> Any:
    """Waits until the condition returns a true value, and returns it."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {within} s"
        time.sleep(0.05)


def raises(kind: type | tuple, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the function and returns its exception, which must be of this kind."""
    try:
        value = function(*arguments, **options)
    except kind as error:
        return error
    names = getattr(kind, "__name__", kind)
    raise AssertionError(f"no {names} was raised; the result was {value!r}")


def same(got: Any, want: Any) -> None:
    assert got == want, f"got {got!r}, want {want!r}"


def lacks(thing: Any, name: str) -> bool:
    return not hasattr(thing, name)
