"""The threads and the time that tests have."""

import logging.config
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parent / "tools"
CONFTEST = """
import limits
limits.SECONDS = 1.0
from limits import *
"""
# The lock is one of C's: no signal and no thread of Python's ends the wait for it.
HANGS = """
import ctypes
def test_passes():
    pass
def test_hangs():
    lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(lock)
def test_passes_too():
    pass
"""


def test_tests_and_what_they_start_compute_with_one_thread():
    assert torch.get_num_threads() == 1
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1"]


@pytest.mark.skipif(sys.platform != "linux", reason="the lock is as large as glibc's")
@pytest.mark.parametrize(
    ("processes", "said"),
    [
        pytest.param(0, "in test_hangs", id="one process"),
        pytest.param(1, "crashed while running 'test_of_a_lock.py::test_hangs'", id="several"),
    ],
)
def test_a_test_that_hangs_fails_by_its_name(processes, said, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_of_a_lock.py").write_text(HANGS)
    options = ["-q", "-p", "no:cacheprovider", f"-n{processes}", "-o", f"pythonpath={TOOLS}"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr
    if processes:
        assert "1 failed, 2 passed" in done.stdout


def test_a_setup_of_logging_leaves_open_what_pytest_captures():
    absl_logging = pytest.importorskip("absl.logging")  # rouge-score imports it
    stream = absl_logging.get_absl_handler().python_handler.stream
    # As a launcher does: it closes every handler there is.
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    assert stream is sys.__stderr__
    assert not stream.closed
