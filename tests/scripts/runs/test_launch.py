"""Which failure of several processes is told as the cause."""

import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from regimen.scripts.runs.launch import Failure, RankFiles, first_failure

SILENT = Failure(0, 6, "another process did not answer", 9.0, by_peer=True, unanswered=True)
LOST = Failure(0, 6, "another process was lost", 1.0, by_peer=True)
OWN = Failure(1, 3, "a broken sample", 8.0)
TERMINATED = Failure(2, 143, "stopped by SIGTERM", 2.0)
REAL_TIME = r"process 1 \(pid 101\) was killed by signal 35"  # which has no name
KILLED = r"process 1 \(pid 101\) was killed by SIGKILL, often for lack of memory"


def ended(codes, seconds):
    failures = {r: ProcessFailure(r, 100 + r, code, "none") for r, code in codes.items()}
    for rank, failure in failures.items():
        failure.timestamp = 1000 + seconds.get(rank, 0)
    return failures


@pytest.mark.parametrize(
    ("told", "codes", "seconds", "stopping", "expected"),
    [
        pytest.param([SILENT], {0: 6, 1: -9}, {1: 30}, False, (6, SILENT.text), id="torch kills"),
        pytest.param([SILENT], {0: 6, 1: -9}, {}, False, (6, KILLED), id="someone kills"),
        pytest.param([LOST], {0: 6, 1: -35}, {}, False, (6, REAL_TIME), id="real-time signal"),
        pytest.param([LOST, OWN, TERMINATED], {0: 6}, {}, False, (3, OWN.text), id="own"),
        pytest.param([LOST], {0: 6}, {}, False, (6, "process 1 left before"), id="left"),
        pytest.param([TERMINATED], {}, {}, True, (143, TERMINATED.text), id="signal"),
        pytest.param([], {}, {}, True, (143, "stopped before"), id="signal at the start"),
    ],
)
def test_the_cause_of_the_others_is_told(tmp_path, told, codes, seconds, stopping, expected):
    files = RankFiles(tmp_path)
    for failure in told:
        files.write_rank(failure.rank, failure)
    if stopping:
        files.stopping.touch()
    found = first_failure(ended(codes, seconds), 3 if OWN in told else 2, files)
    assert found.code == expected[0]
    assert re.match(expected[1], found.text)
    assert len(files.read_ranks()) == len(told)
    assert Failure(**asdict(found)) == found


def test_a_process_whose_launcher_is_gone_leaves(tmp_path):
    command = [sys.executable, "-P", "-m", "regimen.scripts.runs.launch", "0", str(tmp_path)]
    assert subprocess.run(command).returncode == 6
    assert list(tmp_path.iterdir()) == []
