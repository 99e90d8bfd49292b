"""What differs from the run that is resumed, and one history wherever a kill breaks that off."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from regimen.callbacks.early_stopping import EarlyStopping
from regimen.conf.check import with_defaults
from regimen.conf.errors import ConfigError
from regimen.scripts.runs.resume import (
    ABSENT,
    Moment,
    _is_harmless,
    changes,
    find_resume,
    go_back,
    going_back_to,
)
from regimen.trainer.checkpoints.reader import Index, read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError
from toy_runs import listed

STEPS = (5, 10, 15, 20)
SIZES = {"metrics.jsonl": len(b'{"step": 5}\n'), "events.out.tfevents.1.regimen": 3}
MOMENT = Moment(5, SIZES, best=(5,))
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
        "metrics.jsonl": whole["metrics.jsonl"][MOMENT.sizes["metrics.jsonl"] :],
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
                go_back(run, MOMENT)
        except Killed:
            pass
        else:
            assert_at_5(run, whole)
            break
        step = going_back_to(run)
        found = CheckpointStore(run / "checkpoints").newest(step)
        assert found is not None
        reached = found[1]["state"]["step"]
        assert reached in ((5,) if step == 5 else (5, 20))  # without a note: done, or not begun
        outcomes.add((step, reached))
        for orphan in (run / "abandoned").glob("*"):
            if orphan.is_dir() and not any(orphan.iterdir()):
                orphan.rmdir()
        go_back(run, MOMENT)
        assert go_back(run, MOMENT) is None
        assert_at_5(run, whole)
        shutil.rmtree(run)
    else:
        pytest.fail("never came through")
    assert outcomes == {(None, 20), (5, 5), (None, 5)}


def test_a_broken_off_return_may_be_followed_by_one_further_back(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            go_back(run, Moment(15, {"metrics.jsonl": len(b'{"step": 5}\n{"step": 10}\n')}, (15,)))
    assert going_back_to(run) == 15
    go_back(run, MOMENT)
    assert going_back_to(run) is None
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000005.pt"]
    assert len(list((run / "abandoned").iterdir())) == 2


def test_a_best_that_was_removed_is_chosen_anew_and_a_damaged_note_is_an_error(run):
    go_back(run, Moment(10, best=(7,)))
    names = Index.read(run / "checkpoints").names
    assert {name: entry.step for name, entry in names.items()} == {"last": 10}
    assert not (run / "checkpoints" / "best.pt").exists()
    (run / "abandoned" / "unfinished.json").write_text("")
    with pytest.raises(CheckpointError, match=r"unfinished\.json"):
        going_back_to(run)


RUN = {
    "model": {"_target_": "regimen.models.mlp.MLP", "in_features": 4, "num_classes": 2},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    **{"data": {}, "callbacks": {}},
    "transforms": {"train": {"affine": {"_target_": "torchvision.transforms.v2.RandomAffine"}}},
}


@pytest.mark.parametrize(
    ("part", "more", "key"),
    [
        # Empty, or at its default: nothing has changed.
        pytest.param("model", {"activation": "relu"}, None, id="argument"),
        pytest.param("data", {"fold": None}, None, id="null"),
        pytest.param("data", {"views": {}}, None, id="node"),
        pytest.param("data", {"views": {"crops": [], "flip": {"each": None}}}, None, id="nested"),
        pytest.param("callbacks", {"pictures": None}, None, id="null-callback"),
        pytest.param("optimizer", {"param_groups": {"biases": None}}, None, id="null-rule"),
        pytest.param("optimizer", {"lr_scheduler": None}, None, id="null-of-ours"),
        pytest.param("optimizer", {"foreach": None}, None, id="null-is-the-default"),
        # It says something.
        pytest.param("model", {"activation": "gelu"}, "model.activation", id="other-argument"),
        pytest.param("model", {"hidden": []}, "model.hidden", id="empty-argument"),
        pytest.param("model", {"activation": None}, "model.activation", id="null-argument"),
        pytest.param("optimizer", {"momentum": None}, "optimizer.momentum", id="null-number"),
        pytest.param("data", {"views": {"crops": [1]}}, "data.views", id="full-node"),
        pytest.param("data", {"views": {"each": False}}, "data.views", id="false"),
        pytest.param("callbacks", {"mine": {"_target_": "m.C"}}, "callbacks.mine", id="callback"),
    ],
)
def test_what_is_new_is_a_change_if_it_says_something(part, more, key):
    before, later = with_defaults(RUN), with_defaults(RUN | {part: RUN[part] | more})
    (new,) = more.values()
    assert changes(before, later) == ({} if key is None else {key: (ABSENT, new)})
    assert changes(later, before) == ({} if key is None else {key: (new, ABSENT)})


def test_an_order_of_transforms_and_what_is_empty_within_an_argument_are_values():
    first = {"transforms": {"train": {"a": {}, "b": {}}}}
    second = {"transforms": {"train": {"b": {}, "a": {}}}}
    assert [*changes(first, second)] == ["transforms.train (order)"]
    before, after = ({"model": RUN["model"] | {"activation": given}} for given in ({}, {"a": None}))
    assert changes(before, after) == {"model.activation.a": (ABSENT, None)}


def test_a_mirror_is_fetched_over_no_file_of_others(run, tmp_path):
    (run / "manifest.json").write_text("{}")
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.yaml").write_text("mine: 1")
    raw = {"resume": f"file://{run}", "run_dir": str(project), "name": "x", "dry_run": False}
    with pytest.raises(ConfigError, match=r"holds config\.yaml, and no run"):
        find_resume(raw)
    assert [path.name for path in project.iterdir()] == ["config.yaml"]
    (project / "config.yaml").unlink()
    (project / ".lock").touch()  # of a try that was killed, which had begun to fetch
    (project / "metrics.jsonl").write_text("half")
    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):  # of these tests
        find_resume(raw)
    assert (project / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


def test_the_note_of_a_way_back_leads_nowhere_else(run):
    go_back(run, MOMENT)
    (run / "abandoned/unfinished.json").write_text('{"step": 5, "folder": ".."}')
    before = sorted(path for path in run.rglob("*"))
    with pytest.raises(CheckpointError, match=r"unfinished\.json"):
        go_back(run, MOMENT)
    assert sorted(path for path in run.rglob("*")) == before


@pytest.mark.parametrize(
    ("target", "harmless"),
    [
        ("regimen.callbacks.early_stopping.EarlyStopping", False),
        ("regimen.callbacks.histograms.Histograms", True),
    ],
)
def test_a_callback_may_say_that_a_run_trains_the_same_without_it(target, harmless, monkeypatch):
    assert EarlyStopping.affects_result
    monkeypatch.setattr("regimen.callbacks.histograms.Histograms.affects_result", False)
    node = {"_target_": target, "every_n_epochs": 2}
    for before, now in (({"mine": node}, {}), ({}, {"mine": node}), ({"mine": node},) * 2):
        saved, raw = {"callbacks": before}, {"callbacks": now}
        for key in ("callbacks.mine", "callbacks.mine.every_n_epochs"):
            assert _is_harmless(key, saved, raw) is harmless
    assert not _is_harmless("callbacks.other", {"callbacks": {}}, {"callbacks": {}})
    assert not _is_harmless("optimizer.lr", {"callbacks": {}}, {"callbacks": {}})
