import errno
import logging
import math
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.ema import EMA
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.trainer.callback import Callback
from regimen.trainer.checkpoints import store as mechanism
from regimen.trainer.checkpoints.archive import read_safetensors
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.checkpoints.staging import Staging
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import ResourceError, StorageError
from regimen.trainer.files import atomic
from regimen.trainer.state import MAX_TIME
from same_run import logged, state_of
from toy_runs import listed, without_links
from toys import StopAt


class Scores(Callback):
    """Give each validation a chosen value, as if the model were that good."""

    def __init__(self, values):
        self._values = values

    def on_validation_end(self, trainer, metrics):
        trainer.log({"val/score": self._values[trainer.state.epoch - 1]})


def scored(make_trainer, run_dir, scores, log_every_n_steps=2, **options):
    """Return a trainer of an epoch for each score."""
    callbacks = {
        "log": MetricsLog(),
        "scores": Scores(scores),
        "checkpoint": Checkpoint(**{"monitor": "val/score", "mode": "max", **options}),
    }
    epochs = len(scores)
    return make_trainer(callbacks, run_dir, max_epochs=epochs, log_every_n_steps=log_every_n_steps)


def train(*arguments, **options):
    trainer = scored(*arguments, **options)
    trainer.fit()
    return trainer.callbacks["checkpoint"]


class At(Callback):
    """Do something after the update of a step."""

    def __init__(self, step, act):
        self._step = step
        self._act = act

    def on_update_end(self, trainer):
        if trainer.state.global_step == self._step:
            self._act(trainer)


def steps(run_dir):
    paths = (run_dir / "checkpoints").glob("step-*.pt")
    return sorted(int(path.stem.removeprefix("step-")) for path in paths)


def step_of(run_dir, name):
    payload = read_checkpoint(run_dir / "checkpoints" / f"{name}.pt")
    return int(payload["state"]["counters"]["global_step"])


@pytest.mark.parametrize(
    ("options", "scores", "best", "kept"),
    [
        pytest.param({}, [1, 3, 2, 2], 10, [10, 15, 20], id="max"),
        pytest.param({"mode": "min"}, [1, 3, 2, 2], 5, [5, 15, 20], id="min"),
        pytest.param({}, [1, 3, 3, 3], 10, [10, 15, 20], id="of equal ones the earlier"),
        pytest.param({"save_top_k": 2}, [4, 1, 3, 2, 1, 1], 5, [5, 15, 25, 30], id="top 2"),
        pytest.param({}, [1, math.nan, math.nan], 5, [5, 10, 15], id="nan is never best"),
        pytest.param({}, [math.nan, 1, 0], 10, [10, 15], id="after a nan"),
        pytest.param({"save_top_k": -1}, [2, 1, 1, 1], 5, [5, 10, 15, 20], id="all"),
        pytest.param({"save_top_k": 0, "save_last": False}, [1, 2, 3], None, [10, 15], id="none"),
    ],
)
def test_which_are_kept(make_trainer, tmp_path, options, scores, best, kept):
    callback = train(make_trainer, tmp_path, scores, **options)

    reached = []
    for line in logged(tmp_path):
        if "best/val/score" in line:
            reached.append((line["step"], line["best/val/score"]))

    assert steps(tmp_path) == kept

    if best is None:
        assert callback.best_result() is None
        assert reached == []
        assert len(list((tmp_path / "checkpoints").iterdir())) == 3  # and the index
    else:
        best_score = scores[best // 5 - 1]  # an epoch has 5 updates
        assert step_of(tmp_path, "best") == best
        assert callback.best_result() == ("val/score", best_score, best)
        assert reached[-1] == (best, best_score)


@pytest.mark.parametrize("background", [True, False])
def test_a_run_killed_in_its_last_save_has_the_names_when_it_goes_on(
    make_trainer, tmp_path, monkeypatch, background
):
    """The checkpoint is whole, but neither its names nor the index knew of it."""
    folder = tmp_path / "checkpoints"
    point = CheckpointStore._point

    def trainer():
        options = {"save_weights": True, "background": background}
        return scored(make_trainer, tmp_path, [1.0, 2.0, 3.0], **options)

    def kill(*args):
        entries = args[-1].values()
        if any(entry.step == 15 for entry in entries):
            raise KeyboardInterrupt
        point(*args)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_point", kill)
        with pytest.raises(KeyboardInterrupt):
            trainer().fit()

    assert step_of(tmp_path, "last") == 10
    assert step_of(tmp_path, "best") == 10
    assert steps(tmp_path) == [5, 10, 15]

    trainer().fit(resume="auto")
    assert step_of(tmp_path, "last") == 15
    assert step_of(tmp_path, "best") == 15
    assert steps(tmp_path) == [10, 15]
    assert list(listed(folder)) == [10, 15]

    weights = read_safetensors(folder / "best.safetensors")
    best = torch.load(folder / "best.pt", weights_only=True)
    assert torch.equal(weights["0.weight"], best["model"]["0.weight"])


@pytest.fixture
def writes(monkeypatch):
    """The steps that were to be written, and, by step, what this raises and what it waits for."""
    write = mechanism.write_archive
    found = SimpleNamespace(tried=[], errors={}, gates={})

    def wrapped(path, payload):
        step = payload["state"]["counters"]["global_step"]
        found.tried.append(step)
        if step in found.gates:
            opened = found.gates[step].wait(20)
            assert opened
        if step in found.errors:
            raise found.errors[step]
        return write(path, payload)

    monkeypatch.setattr(mechanism, "write_archive", wrapped)
    return found


FULL = StorageError("cannot write: no space left")


def test_a_failed_save_is_told_and_tried_again(make_trainer, tmp_path, writes, caplog):
    writes.errors |= dict.fromkeys(range(8), FULL)
    checkpoint = Checkpoint(every_n_epochs=None, every_n_steps=3)
    with caplog.at_level(logging.WARNING):
        make_trainer({"checkpoint": checkpoint}, tmp_path, log_every_n_steps=2).fit()

    # Due at 3; 4, 5 (an epoch's end) and 6 are log boundaries; 8 succeeds; 9 and 10 are due.
    assert writes.tried == [3, 4, 5, 6, 8, 9, 10]

    told = [f"no checkpoint at step {step}: {FULL}" for step in (3, 4, 6)]
    assert caplog.messages == told
    assert steps(tmp_path) == [9, 10]


def test_a_run_whose_last_save_fails_fails(make_trainer, tmp_path, writes):
    writes.errors = dict.fromkeys(range(11), FULL)
    checkpoint = Checkpoint(every_n_steps=3)
    trainer = make_trainer({"checkpoint": checkpoint}, tmp_path)

    with pytest.raises(StorageError, match="no space left"):
        trainer.fit()
    assert trainer.state.global_step == 10
    assert checkpoint.best_result() is None


def test_a_run_that_has_no_memory_left_for_a_save_fails(make_trainer, tmp_path, writes):
    writes.errors[6] = ResourceError("cannot write: no memory left")
    trainer = make_trainer({"checkpoint": Checkpoint(every_n_steps=3)}, tmp_path)
    with pytest.raises(ResourceError, match="no memory left"):
        trainer.fit()
    # That of the thread is raised by the next save at the latest.
    assert trainer.state.global_step <= 9


def test_a_failure_of_the_last_but_one_write_does_not_fail_the_run(
    make_trainer, tmp_path, writes, monkeypatch
):
    # Saved in the background as the end of an epoch, and tried again as the end of the run.
    writes.errors[10] = FULL
    checkpoint = Checkpoint()
    warn = checkpoint._warn

    def make_room_and_warn(*told):
        writes.errors.clear()
        warn(*told)

    monkeypatch.setattr(checkpoint, "_warn", make_room_and_warn)
    make_trainer({"checkpoint": checkpoint}, tmp_path).fit()

    assert (tmp_path / "checkpoints" / "step-00000010.pt").exists()


def test_the_best_survives_a_disk_that_is_full_exactly_at_its_name(
    make_trainer, tmp_path, monkeypatch
):
    """Without hard links a name is a copy; the checkpoint itself is whole."""

    def full(path):
        if path.name == "best.pt":
            raise OSError(errno.ENOSPC, "full")
        return replacing(path)

    replacing = atomic.replacing
    monkeypatch.setattr(os, "link", without_links)
    scores = [1.0, 2.0, 1.0, 1.0, 1.0]
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "replacing", full)
        with pytest.raises(StorageError, match="no space left"):
            train(make_trainer, tmp_path, scores, log_every_n_steps=100)

    assert steps(tmp_path) == [10, 20, 25]

    second = scored(make_trainer, tmp_path, scores)
    second.fit(resume="auto")
    assert second.callbacks["checkpoint"].best_result() == ("val/score", 2.0, 10)
    assert step_of(tmp_path, "best") == 10


@pytest.mark.parametrize(
    ("reason", "best"), [(("SIGTERM", 143), 5), ((MAX_TIME,), 5), (("by a callback",), 6)], ids=str
)
def test_only_a_save_that_the_run_does_anyway_is_ranked(make_trainer, tmp_path, reason, best):
    """Validations at steps 3, 6, 9 fall between the saves at 5 and 10."""
    callback = Checkpoint(monitor="val/loss", save_top_k=-1)
    stop = At(6, lambda trainer: trainer.state.request_stop(*reason))
    callbacks = {"stop": stop, "checkpoint": callback}
    make_trainer(callbacks, tmp_path, validate_every_n_steps=3).fit()

    assert steps(tmp_path) == [5, 6]
    assert callback.best_result()[2] == best
    assert step_of(tmp_path, "best") == best
    assert step_of(tmp_path, "last") == 6


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [5, 10]),
        ({"every_n_epochs": 2}, [10]),
        ({"every_n_epochs": None, "every_n_steps": 4}, [4, 8, 10]),  # and the end
        ({"every_n_epochs": None}, [10]),
        ({"every_n_steps": 3}, [3, 5, 6, 9, 10]),
    ],
)
@pytest.mark.parametrize("validated", [True, False])
def test_when(make_trainer, tmp_path, options, kept, validated):
    callback = Checkpoint(save_top_k=-1, **options)
    make_trainer({"checkpoint": callback}, tmp_path, validated=validated).fit()

    assert steps(tmp_path) == kept
    assert step_of(tmp_path, "last") == 10

    if validated:
        assert callback.monitor == "val/accuracy"  # the task's metric
    else:
        assert callback.monitor is None
        assert step_of(tmp_path, "best") == 10  # without a metric the newest is the best


def test_the_saved_state_knows_of_its_own_save_and_its_own_value(make_trainer, tmp_path):
    # Saved in the middle of the second epoch, too: the first one's value says nothing about it.
    train(make_trainer, tmp_path, [9.0, 1.0], every_n_epochs=None, every_n_steps=3)
    payload = read_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert payload["callbacks"]["checkpoint"]["ranking"] == [(10, 1.0)]
    assert listed(tmp_path / "checkpoints")[10].metrics["val/score"] == 1.0


def test_a_signal_saves_where_it_stopped_only_once(make_trainer, tmp_path, writes):
    checkpoint = Checkpoint(every_n_epochs=None, every_n_steps=4)
    trainer = make_trainer({"checkpoint": checkpoint, "stop": StopAt(7)}, tmp_path)
    trainer.fit()
    checkpoint.save_now(trainer)

    assert writes.tried == [4, 7]


def test_a_signal_before_the_first_update_saves_nothing(make_trainer, tmp_path):
    trainer = make_trainer({"checkpoint": Checkpoint()}, tmp_path)
    trainer.state.request_stop("SIGTERM", 143)
    trainer.fit()
    assert not (tmp_path / "checkpoints").exists()


def test_what_is_written_later_is_the_state_of_the_step(make_trainer, tmp_path, writes):
    seen = []

    def run(name, background):
        gate = threading.Event()
        if not background:
            gate.set()
        writes.gates[6] = gate

        def look_and_open(trainer):
            seen.append(step_of(tmp_path / name, "last"))
            gate.set()

        callbacks = {
            "ema": EMA(0.9),
            "look": At(8, look_and_open),
            "checkpoint": Checkpoint(
                every_n_steps=3, save_top_k=-1, save_weights=True, background=background
            ),
        }
        make_trainer(callbacks, tmp_path / name).fit()
        return tmp_path / name / "checkpoints"

    whole = run("whole", background=False)
    later = run("beside", background=True)

    assert seen == [6, 5]  # at step 8; of the run beside, the write of step 6 was under way
    assert {path.name for path in later.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.glob("*.pt"):
        assert state_of(whole.parent, path.stem) == state_of(later.parent, path.stem)

    written = (later / "best.safetensors").read_bytes()
    assert written == (whole / "best.safetensors").read_bytes()

    weights = read_safetensors(later / "best.safetensors")
    best = read_checkpoint(later / "best.pt")
    average = best["ema"]["model"]  # those that were evaluated

    for key, value in average.items():
        assert torch.equal(weights[key], value)
    assert not torch.equal(average["0.weight"], best["model"]["0.weight"])


def test_an_exception_waits_for_the_write_under_way(make_trainer, tmp_path, writes):
    gate = threading.Event()
    writes.gates[6] = gate

    def fail(trainer):
        threading.Timer(0.05, gate.set).start()  # while the run ends
        raise KeyError("of the user's")

    callbacks = {"fail": At(7, fail), "checkpoint": Checkpoint(every_n_steps=3)}
    trainer = make_trainer(callbacks, tmp_path, max_epochs=9)

    with pytest.raises(KeyError):
        trainer.fit()
    assert max(listed(tmp_path / "checkpoints")) == 6


@pytest.fixture
def tree():
    """Return tensors of all kinds in a mapping."""
    shared = torch.randn(4, 4)
    image = torch.randn(2, 3, 4, 4)
    return {
        "a": shared,
        "tied": shared,
        "row": shared[0],
        "image": image.to(memory_format=torch.channels_last),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "set": {1},
    }


def test_a_copy_is_equal_and_apart(tree):
    kept = tree["a"].clone()
    copy = Staging().copy(tree)
    tree["a"].add_(1)
    tree["set"].add(2)

    assert copy["a"] is copy["tied"]
    assert torch.equal(copy["a"], kept)
    assert torch.equal(copy["row"], kept[0])
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))
    assert copy["image"].is_contiguous(memory_format=torch.channels_last)
    assert copy["meta"].is_meta
    assert copy["set"] == {1}


def test_the_memory_of_a_copy_is_used_again(tree):
    staging = Staging()
    copy = staging.copy(tree)
    place = copy["a"].data_ptr()
    tree["a"].add_(1)
    again = staging.copy({"new": torch.ones(2), **tree})

    assert again["a"].data_ptr() == place
    assert torch.equal(again["a"], tree["a"])
