"""A time limit for every test: one that hangs fails by its name, within minutes.

A thread of C's ends the process, after it has printed where each thread of Python's stands. A
signal or a thread of Python's would not do: neither gets its turn while the code waits for a lock
in C. pytest-xdist reports the test of the process that ended, and goes on in a new one.
"""

import faulthandler
import os
from collections.abc import Generator

import pytest

SECONDS = 300.0  # of a test's set-up, call or tear-down, on a busy machine
SLOW_SECONDS = 1500.0  # of those that start runs of their own, or compile
_standard_error: list[int] = []


def pytest_configure() -> None:
    """Keep the standard error, which pytest captures during a test."""
    _standard_error[:] = [os.dup(2)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """End the process when a part of a test takes longer than its limit."""
    slow = item.get_closest_marker("slow") is not None
    limit = SLOW_SECONDS if slow else SECONDS
    faulthandler.dump_traceback_later(limit, exit=True, file=_standard_error[0])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup
