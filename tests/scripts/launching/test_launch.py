"""Which failure of several processes is told as the cause."""

import re

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from scripts.launching.launch import _first
from scripts.launching.notes import FailureReport, LaunchNotes
from trainer.errors import SilentPeerError


def ended(codes, seconds):
    failures = {r: ProcessFailure(r, 100 + r, code, "none") for r, code in codes.items()}
    for rank, failure in failures.items():
        failure.timestamp = 1000 + seconds[rank]
    return ChildFailedError("rank", failures)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        pytest.param(30, "another process did not answer within 8 s", id="by-torch-afterwards"),
        pytest.param(0, r"process 1 \(pid 101\) was killed by SIGKILL", id="by-someone"),
    ],
)
def test_a_process_that_torch_kills_in_the_end_is_not_the_cause(
    tmp_path, monkeypatch, seconds, text
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    notes = LaunchNotes(tmp_path)
    error = SilentPeerError.after(8)
    notes.report(
        FailureReport.of(
            error, rank=0, code=6, text=str(error), time=1000.0, by_peer=True, unanswered=True
        )
    )
    end = ended({0: 6, 1: -9}, {0: 0, 1: seconds})
    assert re.match(text, _first(end, 2, notes).text)
