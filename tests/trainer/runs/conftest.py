"""Processes that hold a run."""

import pytest

from toy_runs import FORK, hold


@pytest.fixture
def holding():
    """Start processes that hold a run; end them with the test."""
    started = []

    def start(path, **options):
        ready = FORK.Event()
        process = FORK.Process(target=hold, args=(path, ready), kwargs=options)
        process.start()
        started.append(process)
        assert ready.wait(20)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
