"""One history of a run, wherever a kill breaks off its return to a checkpoint."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from regimen.trainer.checkpoints.reader import Index, read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError
from regimen.trainer.runs.rewind import RewindPoint, interrupted_rewind, rewind
from toy_runs import listed

STEPS = (5, 10, 15, 20)
SIZES = {"metrics.jsonl": len(b'{"step": 5}\n'), "events.out.tfevents.1.regimen": 3}
POINT = RewindPoint(5, SIZES, best=(5,))
CHANGING = ("replace", "link", "truncate", "unlink", "mkdir", "fsync")


class Killed(BaseException):
    """What comes instead of a kill -9."""


def content(step):
    return {"model": {"w": torch.tensor([float(step)])}, "state": {"step": step}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 20 steps; step 15 is its best, as step 5 was in its time."""
    run = tmp_path_factory.mktemp("finished") / "run"
    board = run / "tensorboard"
    board.mkdir(parents=True)
    store = CheckpointStore(run / "checkpoints")
    for step in STEPS:
        names = ["last", "best"] if step in (5, 15) else ["last"]
        store.save(content(step), step=step, names=names)
    lines = [json.dumps({"step": step}) for step in STEPS]
    (run / "checkpoints" / "best.safetensors").write_bytes(b"of 15")
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (board / "events.out.tfevents.1.regimen").write_bytes(b"abcdef")
    (board / "events.out.tfevents.2.regimen").write_bytes(b"ghi")
    return run


@pytest.fixture
def run(finished, tmp_path):
    return copied(finished, tmp_path / "run")


def copied(run, target):
    """Copy a run with the hard links between its checkpoints."""
    shutil.copytree(run, target)
    for name, step in (("last", 20), ("best", 15)):
        path = target / "checkpoints" / f"{name}.pt"
        path.unlink()
        os.link(target / "checkpoints" / f"step-{step:08d}.pt", path)
    return target


def files(run):
    """Return every file but the index, whose text follows from the others."""
    found = {}
    for path in run.rglob("*"):
        if path.is_file() and path.name != "index.json":
            found[path.relative_to(run).as_posix()] = path.read_bytes()
    return found


def is_checkpoint_beyond_5(name):
    return name.startswith("checkpoints/") and "05.pt" not in name


def assert_at_5(run, whole):
    """Nothing beyond step 5 is left, and nothing of it is lost."""
    (folder,) = (run / "abandoned").iterdir()
    moved = files(folder)
    left = {name: text for name, text in files(run).items() if not name.startswith("abandoned/")}
    step_5 = whole["checkpoints/step-00000005.pt"]
    assert left == {
        "checkpoints/last.pt": step_5,
        "checkpoints/best.pt": step_5,
        "checkpoints/step-00000005.pt": step_5,
        "metrics.jsonl": b'{"step": 5}\n',
        "tensorboard/events.out.tfevents.1.regimen": b"abc",
    }
    kept_of_log = POINT.sizes["metrics.jsonl"]
    assert moved == {
        **{name: text for name, text in whole.items() if is_checkpoint_beyond_5(name)},
        "metrics.jsonl": whole["metrics.jsonl"][kept_of_log:],
        "tensorboard/events.out.tfevents.1.regimen": b"def",
        "tensorboard/events.out.tfevents.2.regimen": b"ghi",
    }

    index = Index.read(run / "checkpoints")
    assert sorted(index.files) == ["step-00000005.pt"]
    assert {name: entry.step for name, entry in index.names.items()} == {"last": 5, "best": 5}

    best = read_checkpoint(folder / "checkpoints" / "best.pt")
    assert list(listed(folder / "checkpoints")) == [10, 15, 20]
    assert best["state"]["step"] == 15


class Countdown:
    """Kills at a call of os that changes a folder: after so many that come through."""

    def __init__(self, calls):
        self.left = calls

    def counted(self, original):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return original(*args, **kwargs)

        return call


def is_rewound(run, calls, monkeypatch):
    """Return to step 5, be killed after so many calls, and say whether it came through."""
    countdown = Countdown(calls)
    try:
        with monkeypatch.context() as patch:
            for name in CHANGING:
                patch.setattr(os, name, countdown.counted(getattr(os, name)))
            rewind(run, POINT)
    except Killed:
        return False
    return True


def remove_empty_folders(place):
    for folder in place.glob("*"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def test_a_kill_at_any_point_leaves_a_run_that_can_go_on(finished, tmp_path, monkeypatch):
    whole = files(finished)
    outcomes = set()
    for number in range(200):
        run = copied(finished, tmp_path / str(number))
        if is_rewound(run, number, monkeypatch):
            assert_at_5(run, whole)
            break

        step = interrupted_rewind(run)
        _, loaded, _ = CheckpointStore(run / "checkpoints").newest(step)
        reached = loaded["state"]["step"]
        if step == 5:
            assert reached == 5
        else:
            assert reached in (5, 20)  # without a note: done, or not begun
        outcomes.add((step, reached))

        remove_empty_folders(run / "abandoned")
        rewind(run, POINT)
        assert rewind(run, POINT) is None
        assert_at_5(run, whole)
        shutil.rmtree(run)
    else:
        pytest.fail("never came through")

    assert outcomes == {(None, 20), (5, 5), (None, 5)}


def test_a_broken_off_return_may_be_followed_by_one_further_back(run, monkeypatch):
    def kill(*_):
        raise Killed

    size = len(b'{"step": 5}\n{"step": 10}\n')
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", kill)
        with pytest.raises(Killed):
            rewind(run, RewindPoint(15, {"metrics.jsonl": size}, (15,)))

    assert interrupted_rewind(run) == 15

    rewind(run, POINT)
    left = [path.name for path in (run / "checkpoints").glob("step-*")]
    assert interrupted_rewind(run) is None
    assert left == ["step-00000005.pt"]
    assert len(list((run / "abandoned").iterdir())) == 2


def test_a_best_that_was_removed_is_chosen_anew(run):
    rewind(run, RewindPoint(10, best=(7,)))
    names = Index.read(run / "checkpoints").names
    assert {name: entry.step for name, entry in names.items()} == {"last": 10}
    assert not (run / "checkpoints" / "best.pt").exists()


def test_a_damaged_note_of_a_way_back_is_an_error(run):
    rewind(run, POINT)
    (run / "abandoned" / "unfinished.json").write_text("")
    with pytest.raises(CheckpointError, match=r"unfinished\.json"):
        interrupted_rewind(run)


def test_the_note_of_a_way_back_leads_nowhere_else(run):
    rewind(run, POINT)
    (run / "abandoned/unfinished.json").write_text('{"step": 5, "folder": ".."}')
    before = sorted(path for path in run.rglob("*"))

    with pytest.raises(CheckpointError, match=r"unfinished\.json"):
        rewind(run, POINT)
    assert sorted(path for path in run.rglob("*")) == before
