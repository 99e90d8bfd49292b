"""A checkpoint written beside the training is the one that the loop would have waited for."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from same_run import state_of
from trainer.callback import Callback
from trainer.checkpoints import store as mechanism
from trainer.checkpoints.reader import read_checkpoint
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import ResourceError, StorageError


class At(Callback):
    """Do something after the update of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self._step, self._act = step, act

    def on_update_end(self, trainer: Any) -> None:
        if trainer.state.global_step == self._step:
            self._act()


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that keeps the write of a step from going on, and the gates' events."""
    write, gates = mechanism.write_archive, {}

    def waiting(path: Path, payload: dict[str, Any]) -> Any:
        gate = gates.get(payload["state"]["counters"]["global_step"])
        assert gate is None or gate.wait(20)
        return write(path, payload)

    def close(step: int) -> threading.Event:
        return gates.setdefault(step, threading.Event())

    monkeypatch.setattr(mechanism, "write_archive", waiting)
    return close


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets the write of a step fail once."""
    write, errors = mechanism.write_archive, {}

    def perhaps(path: Path, payload: dict[str, Any]) -> Any:
        error = errors.pop(payload["state"]["counters"]["global_step"], None)
        if error is not None:
            raise error
        return write(path, payload)

    monkeypatch.setattr(mechanism, "write_archive", perhaps)
    return errors.__setitem__


def test_what_is_written_later_is_the_state_of_the_step(
    make_trainer: Any, tmp_path: Path, gated: Any
) -> None:
    seen = []

    def run(name: str, background: bool) -> None:
        gate = gated(6)
        gate.clear()
        if not background:
            gate.set()
        checkpoint = Checkpoint(
            every_n_steps=3, save_top_k=-1, save_weights=True, background=background
        )
        last = tmp_path / name / "checkpoints" / "last.pt"
        look = At(8, lambda: seen.append(read_checkpoint(last)["state"]["counters"]["global_step"]))
        callbacks = {"ema": EMA(0.9), "look": look, "open": At(8, gate.set)}
        callbacks["checkpoint"] = checkpoint
        make_trainer(callbacks, tmp_path / name, max_epochs=2).fit()

    run("whole", background=False)
    run("beside", background=True)
    assert seen == [6, 5]  # at step 8; of the run beside, the write of step 6 was under way
    files = sorted(p.name for p in (tmp_path / "whole/checkpoints").iterdir())
    assert sorted(p.name for p in (tmp_path / "beside/checkpoints").iterdir()) == files
    for path in (tmp_path / "whole/checkpoints").glob("*.pt"):
        assert state_of(tmp_path / "whole", path.stem) == state_of(tmp_path / "beside", path.stem)
    weights = [
        (tmp_path / n / "checkpoints/best.safetensors").read_bytes() for n in ("whole", "beside")
    ]
    assert weights[0] == weights[1]


def test_a_failed_write_is_told_at_the_next_boundary_and_tried_again(
    make_trainer: Any, tmp_path: Path, failing: Any, caplog: Any
) -> None:
    failing(6, StorageError("cannot write: no space left"))
    checkpoint = Checkpoint(every_n_epochs=None, every_n_steps=3, save_top_k=-1, monitor=None)
    with caplog.at_level(logging.WARNING):
        make_trainer({"checkpoint": checkpoint}, tmp_path, log_every_n_steps=2).fit()
    assert caplog.messages == ["no checkpoint at step 6: cannot write: no space left"]
    store = CheckpointStore(tmp_path / "checkpoints")
    assert [entry.step for entry in store.entries()] in ([3, 8, 9, 10], [3, 9, 10])
    last = store.load(tmp_path / "checkpoints" / "last.pt")
    assert [step for step, _ in last["callbacks"]["checkpoint"]["ranking"]] == [10]


def test_a_failure_of_the_last_but_one_write_does_not_fail_the_run(
    make_trainer: Any, tmp_path: Path, failing: Any
) -> None:
    failing(10, StorageError("cannot write: no space left"))
    # Saved in the background as the end of an epoch, and tried again as the end of the run.
    make_trainer({"checkpoint": Checkpoint()}, tmp_path, max_epochs=2).fit()
    assert (tmp_path / "checkpoints" / "step-00000010.pt").exists()


def test_memory_that_gives_out_in_the_thread_ends_the_run(
    make_trainer: Any, tmp_path: Path, failing: Any
) -> None:
    failing(6, ResourceError("cannot write: no memory left"))
    trainer = make_trainer({"checkpoint": Checkpoint(every_n_steps=3)}, tmp_path, max_epochs=9)
    with pytest.raises(ResourceError, match="no memory left"):
        trainer.fit()
    assert trainer.state.global_step <= 9  # the next save at the latest waits for it


def test_an_exception_waits_for_the_write_under_way(
    make_trainer: Any, tmp_path: Path, gated: Any
) -> None:
    gate = gated(6)

    def fail() -> None:
        threading.Timer(0.05, gate.set).start()  # while the run ends
        raise KeyError("of the user's")

    callbacks = {"fail": At(7, fail), "checkpoint": Checkpoint(every_n_steps=3)}
    with pytest.raises(KeyError):
        make_trainer(callbacks, tmp_path, max_epochs=9).fit()
    assert CheckpointStore(tmp_path / "checkpoints").entries()[-1].step == 6
    assert [t.name for t in threading.enumerate() if t.name == "checkpoint"] == []
