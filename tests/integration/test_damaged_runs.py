"""What a run's checkpoint holds is not asked of its other files; what is not there is said."""

import json

import pytest

from same_run import differences
from scripts.evaluate import evaluate
from trainer.checkpoints.store import CheckpointStore

QUICK = ["experiment=resnet18", "model=mlp", "trainer.max_steps=3", "loader.num_workers=0"]


@pytest.mark.parametrize("name", ["status.json", "config.yaml", "manifest.json"])
def test_an_empty_file_of_a_run_does_not_keep_it_from_going_on(train, job, whole, killed, name):
    for step in range(30, 45, 5):
        (killed / "checkpoints" / f"step-{step:08d}.pt").unlink()
    (killed / "checkpoints" / "last.pt").unlink()
    (killed / name).write_text("")
    run = train([*job, f"run_dir={killed}", "resume=auto"])
    assert run.code == 0, run.err
    (warning,) = [line for line in run.err.splitlines() if name in line]
    assert warning.startswith("warning: ")
    assert differences(whole, killed) == []
    assert (killed / name).read_text().strip()
    if name == "config.yaml":
        assert (killed / name).read_text() == (whole / name).read_text()


def test_an_index_that_is_set_up_anew_has_the_metrics_of_the_log(whole, killed):
    (killed / "checkpoints" / "index.json").unlink()
    store = CheckpointStore(killed / "checkpoints")
    store.clean()
    wanted = {e.step: e.metrics for e in CheckpointStore(whole / "checkpoints").entries()}
    assert len(wanted) == 8
    assert "val/accuracy" in wanted[40]
    assert {entry.step: entry.metrics for entry in store.entries()} == wanted


def test_the_hint_names_the_split_that_is_there(train, tmp_path, capsys, monkeypatch):
    run = train([*QUICK, "data.test=null", f"run_dir={tmp_path / 'run'}"])
    assert run.code == 0, run.err
    hint = next(line for line in run.out.splitlines() if line.startswith("again"))
    assert hint.split() == ["again", "evaluate", f"run={tmp_path / 'run'}", "split=val"]
    assert evaluate(hint.split()[2:]) == 0
    assert "val/accuracy" in capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found["split"] == "val"
    assert evaluate([f"run={tmp_path / 'run'}"]) == 0  # what is there is taken, and said
    assert "the data have no test split: split=val" in capsys.readouterr().err


def test_without_anything_held_out_there_is_no_hint(train, tmp_path):
    held = ["data.test=null", "data.val=null", "lr_scheduler=constant"]
    run = train([*QUICK, *held, f"run_dir={tmp_path / 'run'}"])
    assert run.code == 0, run.err
    assert "again" not in run.out
    refused = train([*QUICK, *held, "lr_scheduler=plateau", f"run_dir={tmp_path / 'other'}"])
    assert refused.code == 2
    assert "data.val is null" in refused.error
    assert not (tmp_path / "other").exists()
