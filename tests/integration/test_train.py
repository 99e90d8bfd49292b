"""`train` and `evaluate` from the command line, on real digits, and on parts that do not fit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from same_run import differences, logged, repeated_steps

QUICK = ["experiment=resnet18", "model=mlp", "optimizer=sgd_nesterov", "trainer.max_epochs=2"]


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return train([*QUICK, "callbacks=[default,ema]", f"run_dir={folder}"]), folder


def test_files_of_a_run(finished):
    _, folder = finished
    names = "config.yaml overrides.yaml inference.json manifest.json train.log status.json"
    expected = {*names.split(), "metrics.jsonl", "tensorboard", "checkpoints"}
    assert {path.name for path in folder.iterdir()} - {".lock"} == expected
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"last.pt", "best.pt", "index.json", "step-00000040.pt"} <= checkpoints
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run_dir"] is config["resume"] is config["dry_run"] is None
    assert config["lr_scheduler"]["total_steps"] == "${total_steps}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["seed"], manifest["exit"]["code"]) == (0, 0)
    assert repeated_steps(folder) == []
    keys = "train/loss val/loss val/accuracy test/accuracy lr/default time/samples_per_second"
    assert {*keys.split()} <= {key for line in logged(folder) for key in line}


def test_the_closing_block_names_the_next_steps(finished):
    run, folder = finished
    for text in (str(folder), "val/accuracy", "tensorboard --logdir", f"evaluate run={folder}"):
        assert text in run.out
    assert "the average of callbacks.ema" in run.out
    assert "error:" not in run.err
    versions, device, *lines = run.err.splitlines()
    assert re.fullmatch(r"regimen \S+, torch \S+", versions)
    assert re.fullmatch(r"device: .+, threads: \d+", device)
    assert not any("regimen 0." in line for line in lines)
    assert 0 < max(len(line) for line in lines if line.startswith("epoch ")) <= 100


def test_evaluate_repeats_the_figures(finished, evaluated):
    """Those of the average: it is what was validated, and is tested."""
    _, folder = finished
    found = [evaluated(folder), evaluated(folder, "split=val", "checkpoint=last")]
    (folder / "evaluation.json").unlink()
    lines = [line for line in logged(folder) if "test/loss" in line or "val/loss" in line]
    for again, line in zip(found, (lines[-1], lines[-2]), strict=True):
        figures = {key: line[key] for key in line if key.endswith(("/loss", "/accuracy"))}
        assert figures.items() <= again.items()


def test_a_run_repeats_from_its_own_config(finished, train, tmp_path):
    _, folder = finished
    arguments = ["--config-dir", str(folder), "--config-name", "config"]
    train([*arguments, f"run_dir={tmp_path / 'again'}"])
    assert differences(folder, tmp_path / "again") == []


REFUSED = [
    "+callbacks.unfreeze._target_=regimen.callbacks.unfreeze.Unfreeze",
    "+callbacks.unfreeze.stages={a:{pattern:x}}",
]


@pytest.mark.parametrize("options", [[], ["run_dir=run"], ["run_dir=here"]])
def test_a_mistake_that_only_the_built_run_shows_leaves_nothing(train, tmp_path, options):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("the user's own")
    run = train([*QUICK, *REFUSED, *options], 2, folder=tmp_path)
    assert run.err.count("error: ") == 1
    assert "callbacks.unfreeze.stages.a.pattern=x: matches no parameter" in run.err
    assert {path.name for path in tmp_path.rglob("*")} == {"here", "notes.txt"}


SHORT = ["experiment=resnet18", "model=mlp", "callbacks=none", "trainer.max_steps=2"]
TABLE = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text())

USERS = Path(__file__).with_name("user_code.py")


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row[0])) for row in TABLE["runs"]])
def test_what_a_run_meets_is_one_line_with_its_code(train, tmp_path, row):
    """Beside a module of the user's own, and two that cannot be imported."""
    shutil.copy(USERS, tmp_path / "users.py")
    (tmp_path / "broken.py").write_text("class Net(\n")
    (tmp_path / "lacking.py").write_text("import nowhere_to_be_found\n")
    overrides, code, *texts = row
    done = train([*SHORT, "run_dir=run", *overrides], code, folder=tmp_path)
    said = done.err.splitlines()[-1] if code == 1 else done.error
    assert [text for text in texts if text not in said] == []
    assert done.err.count("error: ") == 1
    assert done.err.count("Traceback (most recent call last)") == (code == 1)
    if code == 2 or (code == 1 and "dry_run=true" in overrides):
        assert not (tmp_path / "run").exists()


def test_a_plan_looks_at_what_would_be_resumed_and_at_a_taken_run_dir(finished, train, tmp_path):
    run = shutil.copytree(finished[1], tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = [*QUICK, "callbacks=[default,ema]", "dry_run=true"]
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.yaml").write_text("mine: 1\n")
    longer = ["trainer.max_epochs=3", f"run_dir={run}", "resume=auto"]
    other = [*longer, "model.hidden=[7]", "resume_policy=override"]
    refused = (
        ([f"run_dir={run}"], 2, f"run_dir: {run} already holds a run"),
        ([f"run_dir={tmp_path / 'others'}"], 2, "holds config.yaml, and no run"),
        ([f"resume={tmp_path / 'nothing'}"], 2, "resume: there is no"),
        ([f"resume={tmp_path / 'others'}"], 2, "holds no run"),
        ([f"resume=file://{tmp_path / 'nothing'}"], 7, "cannot read the run at file://"),
        (["optimizer.lr=0.5", f"resume={run}"], 4, "the configuration differs"),
        (other, 4, "does not fit the model"),
    )
    for more, code, text in refused:
        assert text in train([*words, *more], code=code).error
    assert "already finished" in train([*words, f"run_dir={run}", "resume=auto"]).err
    shown = train([*words, *longer])
    assert f"a run would write to {run}" in shown.out
    assert "it would go on: changed: trainer.max_epochs: 2 -> 3" in shown.err
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {run / "plan.txt"}
    assert before.items() <= after.items()
