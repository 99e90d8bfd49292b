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
    (run / "tensorboard").mkdir(parents=True)
    store = CheckpointStore(run / "checkpoints")
    for step in STEPS:
        names = ["last", "best"] if step in (5, 15) else ["last"]
        store.save(content(step), step=step, names=names)
    (run / "checkpoints" / "best.safetensors").write_bytes(b"of 15")
    lines = "".join(json.dumps({"step": step}) + "\n" for step in STEPS)
    (run / "metrics.jsonl").write_text(lines)
    (run / "tensorboard" / "events.out.tfevents.1.regimen").write_bytes(b"abcdef")
    (run / "tensorboard" / "events.out.tfevents.2.regimen").write_bytes(b"ghi")
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
    paths = (path for path in run.rglob("*") if path.is_file() and path.name != "index.json")
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}


def assert_at_5(run, whole):
    """Nothing beyond step 5 is left, and nothing of it is lost."""
    (folder,) = (run / "abandoned").iterdir()
    left = files(run)
    moved = {k: left.pop(k) for k in list(left) if k.startswith("abandoned/")}
    step_5 = whole["checkpoints/step-00000005.pt"]
    assert left == {
        **{f"checkpoints/{name}.pt": step_5 for name in ("last", "best", "step-00000005")},
        "metrics.jsonl": b'{"step": 5}\n',
        "tensorboard/events.out.tfevents.1.regimen": b"abc",
    }
    beyond = {
        **{k: v for k, v in whole.items() if k.startswith("checkpoints/") and "05.pt" not in k},
        "metrics.jsonl": whole["metrics.jsonl"][POINT.sizes["metrics.jsonl"] :],
        "tensorboard/events.out.tfevents.1.regimen": b"def",
        "tensorboard/events.out.tfevents.2.regimen": b"ghi",
    }
    assert {k.removeprefix(f"abandoned/{folder.name}/"): v for k, v in moved.items()} == beyond
    index = Index.read(run / "checkpoints")
    assert sorted(index.files) == ["step-00000005.pt"]
    assert {name: entry.step for name, entry in index.names.items()} == {"last": 5, "best": 5}
    away = folder / "checkpoints"
    assert list(listed(away)) == [10, 15, 20]
    assert read_checkpoint(away / "best.pt")["state"]["step"] == 15


def test_a_kill_at_any_point_leaves_a_run_that_can_go_on(finished, tmp_path, monkeypatch):
    whole = files(finished)
    left = 0

    def counted(name):
        original = getattr(os, name)

        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return original(*args, **kwargs)

        return call

    outcomes = set()
    for number in range(200):
        run, left = copied(finished, tmp_path / str(number)), number
        try:
            with monkeypatch.context() as patch:
                for name in CHANGING:
                    patch.setattr(os, name, counted(name))
                rewind(run, POINT)
        except Killed:
            pass
        else:
            assert_at_5(run, whole)
            break
        step = interrupted_rewind(run)
        found = CheckpointStore(run / "checkpoints").newest(step)
        assert found is not None
        reached = found[1]["state"]["step"]
        assert reached in ((5,) if step == 5 else (5, 20))  # without a note: done, or not begun
        outcomes.add((step, reached))
        for orphan in (run / "abandoned").glob("*"):
            if orphan.is_dir() and not any(orphan.iterdir()):
                orphan.rmdir()
        rewind(run, POINT)
        assert rewind(run, POINT) is None
        assert_at_5(run, whole)
        shutil.rmtree(run)
    else:
        pytest.fail("never came through")
    assert outcomes == {(None, 20), (5, 5), (None, 5)}


def test_a_broken_off_return_may_be_followed_by_one_further_back(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            rewind(
                run, RewindPoint(15, {"metrics.jsonl": len(b'{"step": 5}\n{"step": 10}\n')}, (15,))
            )
    assert interrupted_rewind(run) == 15
    rewind(run, POINT)
    assert interrupted_rewind(run) is None
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000005.pt"]
    assert len(list((run / "abandoned").iterdir())) == 2


def test_a_best_that_was_removed_is_chosen_anew_and_a_damaged_note_is_an_error(run):
    rewind(run, RewindPoint(10, best=(7,)))
    names = Index.read(run / "checkpoints").names
    assert {name: entry.step for name, entry in names.items()} == {"last": 10}
    assert not (run / "checkpoints" / "best.pt").exists()
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
