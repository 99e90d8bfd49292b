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
    """A finished run, and its directory."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run = train([*QUICK, "callbacks=[default,ema]", f"run_dir={folder}"])
    return run, folder


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_files_of_a_run(finished):
    _, folder = finished

    assert names_in(folder) - {".lock"} == {
        "config.yaml",
        "overrides.yaml",
        "inference.json",
        "manifest.json",
        "train.log",
        "status.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
    }
    checkpoints = names_in(folder / "checkpoints")
    assert {"last.pt", "best.pt", "index.json", "step-00000040.pt"} <= checkpoints


def test_a_run_keeps_its_configuration_and_what_came_of_it(finished):
    _, folder = finished

    config = yaml.safe_load((folder / "config.yaml").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())

    assert config["run_dir"] is None
    assert config["resume"] is None
    assert config["dry_run"] is None
    assert config["lr_scheduler"]["total_steps"] == "${total_steps}"
    assert manifest["seed"] == 0
    assert manifest["exit"]["code"] == 0


def test_a_run_logs_each_step_once(finished):
    _, folder = finished

    assert repeated_steps(folder) == []
    names = set()
    for line in logged(folder):
        names.update(line)
    assert {
        "train/loss",
        "val/loss",
        "val/accuracy",
        "test/accuracy",
        "lr/default",
        "time/samples_per_second",
    } <= names


def test_the_closing_block_names_the_next_steps(finished):
    run, folder = finished

    for text in (str(folder), "val/accuracy", "tensorboard --logdir", f"evaluate run={folder}"):
        assert text in run.out
    assert "the average of callbacks.ema" in run.out


def test_what_a_run_prints_on_its_way(finished):
    run, _ = finished

    assert "error:" not in run.err
    versions, device, *lines = run.err.splitlines()
    assert re.fullmatch(r"regimen \S+, torch \S+", versions)
    assert re.fullmatch(r"device: .+, threads: \d+", device)
    for line in lines:
        assert "regimen 0." not in line
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert epochs
    for line in epochs:
        assert len(line) <= 100


def figures_of(line):
    return {name: line[name] for name in line if name.endswith(("/loss", "/accuracy"))}


def test_evaluate_repeats_the_figures(finished, evaluated):
    """Those of the average: it is what was validated, and is tested."""
    _, folder = finished

    of_test = evaluated(folder)
    of_val = evaluated(folder, "split=val", "checkpoint=last")
    (folder / "evaluation.json").unlink()

    lines = [line for line in logged(folder) if "test/loss" in line or "val/loss" in line]
    last_val, test = lines[-2:]
    assert figures_of(test).items() <= of_test.items()
    assert figures_of(last_val).items() <= of_val.items()


def test_a_run_repeats_from_its_own_config(finished, train, tmp_path):
    _, folder = finished
    again = tmp_path / "again"

    train(["--config-dir", str(folder), "--config-name", "config", f"run_dir={again}"])

    assert differences(folder, again) == []


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
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"here", "notes.txt"}


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

    run = train([*SHORT, "run_dir=run", *overrides], code, folder=tmp_path)

    if code == 1:  # a fault in the user's own code, whose traceback stands above the line
        said = run.err.splitlines()[-1]
        tracebacks = 1
    else:
        said = run.error
        tracebacks = 0
    for text in texts:
        assert text in said
    assert run.err.count("error: ") == 1
    assert run.err.count("Traceback (most recent call last)") == tracebacks
    if code == 2 or (code == 1 and "dry_run=true" in overrides):
        assert not (tmp_path / "run").exists()


PLAN = [*QUICK, "callbacks=[default,ema]", "dry_run=true"]


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run."""
    _, folder = finished
    return shutil.copytree(folder, tmp_path / "run")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        pytest.param(["run_dir={run}"], 2, "run_dir: {run} already holds a run", id="taken"),
        pytest.param(["run_dir={others}"], 2, "holds config.yaml, and no run", id="other files"),
        pytest.param(["resume={nothing}"], 2, "resume: there is no", id="nothing to resume"),
        pytest.param(["resume={others}"], 2, "holds no run", id="no run to resume"),
        pytest.param(
            ["resume=file://{nothing}"], 7, "cannot read the run at file://", id="nothing remote"
        ),
        pytest.param(
            ["optimizer.lr=0.5", "resume={run}"], 4, "the configuration differs", id="other values"
        ),
        pytest.param(
            [
                "trainer.max_epochs=3",
                "run_dir={run}",
                "resume=auto",
                "model.hidden=[7]",
                "resume_policy=override",
            ],
            4,
            "does not fit the model",
            id="another model",
        ),
    ],
)
def test_a_plan_refuses_what_the_run_would_refuse(train, copied, tmp_path, words, code, text):
    others = tmp_path / "others"
    others.mkdir()
    (others / "config.yaml").write_text("mine: 1\n")
    names = {"run": copied, "others": others, "nothing": tmp_path / "nothing"}
    before = contents(tmp_path)

    refused = train([*PLAN, *[word.format(**names) for word in words]], code=code)

    assert text.format(**names) in refused.error
    assert contents(tmp_path) == before


def test_a_plan_says_what_a_resumed_run_would_do(train, copied):
    before = contents(copied)
    words = [*PLAN, f"run_dir={copied}", "resume=auto"]

    same = train(words)
    longer = train([*words, "trainer.max_epochs=3"])

    assert "already finished" in same.err
    assert f"a run would write to {copied}" in longer.out
    assert "it would go on: changed: trainer.max_epochs: 2 -> 3" in longer.err
    after = contents(copied)
    assert after.keys() - before.keys() == {copied / "plan.txt"}
    assert before.items() <= after.items()
