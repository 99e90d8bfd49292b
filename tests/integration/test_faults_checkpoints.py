"""Damaged, foreign and hostile checkpoints, and empty files of a run, met by the command line."""

import json
import os
import random
import shutil

import pytest
import torch

from regimen.scripts.evaluate import evaluate
from same_run import differences, repeated_steps
from toy_runs import Call, step_file


def contents(folder, pattern="*"):
    return {path: path.read_bytes() for path in folder.rglob(pattern) if path.is_file()}


def half(content):
    return content[: len(content) // 2]


def flip_a_bit(content):
    content = bytearray(content)
    content[5000] ^= 8
    return bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(half, id="half"),
        pytest.param(flip_a_bit, id="a-flipped-bit"),
        pytest.param(lambda content: b"<html>404</html>", id="html"),
    ],
)
def test_auto_goes_on_from_the_newest_whole_one(train, job, whole, killed, damage):
    damaged = [step_file(killed, 40), step_file(killed, 35)]
    for path in damaged:
        path.write_bytes(damage(path.read_bytes()))
    (killed / "checkpoints" / "last.pt").unlink()

    run = train([*job, f"run_dir={killed}", "resume=auto"])

    for path in damaged:
        assert f"passed over {path}" in run.err
    assert "weights_only" not in run.err
    assert "weights_only" not in run.out
    assert differences(whole, killed) == []
    assert repeated_steps(killed) == []


@pytest.mark.parametrize(
    ("spoil", "code", "text"),
    [(lambda path: os.truncate(path, 3000), 4, ""), (os.unlink, 2, "resume")],
    ids=["damaged", "missing"],
)
def test_a_path_that_cannot_be_gone_on_from_is_named(train, job, killed, spoil, code, text):
    path = step_file(killed, 40)
    spoil(path)
    run = train([*job, f"resume={path}"], code)
    assert str(path) in run.error
    assert text in run.error
    assert "weights_only" not in run.err


def test_if_nothing_is_whole_it_does_not_start_anew(train, job, killed):
    for path in (killed / "checkpoints").glob("*.pt"):
        path.write_bytes(random.Random(0).randbytes(5000))
    before = (killed / "metrics.jsonl").read_bytes()
    run = train([*job, f"run_dir={killed}", "resume=auto"], 4)
    assert "no checkpoint is whole" in run.error
    assert (killed / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "path"])
def test_code_is_refused_and_not_run(train, job, killed, tmp_path, auto):
    canary = tmp_path / "canary"
    path = step_file(killed, 40)
    torch.save({"model": Call(os.system, f"touch {canary}"), "format_version": 2}, path)
    resume = [f"run_dir={killed}", "resume=auto"] if auto else [f"resume={path}"]
    run = train([*job, *resume], 4, environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
    assert "refused: contains code (posix.system)" in run.error
    assert not canary.exists()


WIDTHS = "features.2.conv.weight is float32[64, 32, 3, 3] in it, float32[48, 32, 3, 3] in the model"


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (["model.widths=[16,32,48]", "resume_policy=override"], [WIDTHS, "more)"]),
        (["optimizer=adamw", "resume_policy=override"], ["optimizer"]),
        (["optimizer.lr=0.0123"], ["optimizer.lr", "0.0123"]),
    ],
    ids=["architecture", "optimizer", "rate"],
)
@pytest.mark.parametrize("back", [False, True], ids=["auto", "back"])
def test_a_change_that_is_refused_is_told_and_leaves_the_run_alone(
    train, job, killed, change, texts, back
):
    before = contents(killed, "*.jsonl")
    resume = [f"run_dir={killed}", "resume=auto"]
    if back:
        resume = [f"resume={step_file(killed, 10)}"]

    run = train([*job, *resume, *change], 4)

    assert run.error
    for text in texts:
        assert text in run.err
    assert contents(killed, "*.jsonl") == before
    assert step_file(killed, 40).exists()
    assert not (killed / "abandoned").exists()


def test_a_finished_run_is_left_alone(train, job, whole, tmp_path):
    copy = tmp_path / "finished"
    shutil.copytree(whole, copy)
    before = contents(copy)

    again = train([*job, f"run_dir={copy}", "resume=auto"])
    anew = train([*job, f"run_dir={copy}"], 2)

    assert "already finished at epoch 2" in again.err + again.out
    assert "run_dir" in anew.error
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("name", "warnings"), [("status.json", 1), ("config.yaml", 0), ("manifest.json", 1)]
)
def test_an_empty_file_of_a_run_does_not_keep_it_from_going_on(
    train, job, whole, killed, name, warnings
):
    for step in (30, 35, 40):
        step_file(killed, step).unlink()
    (killed / "checkpoints" / "last.pt").unlink()
    (killed / name).write_text("")

    run = train([*job, f"run_dir={killed}", "resume=auto"])

    told = [line for line in run.err.splitlines() if name in line]
    assert len(told) == warnings
    for line in told:
        assert line.startswith("warning: ")
    assert differences(whole, killed) == []
    assert (killed / name).read_text().strip()
    if name == "config.yaml":
        assert (killed / name).read_text() == (whole / name).read_text()


def test_the_hint_names_the_split_that_is_there(train, tmp_path, capsys):
    run_dir = tmp_path / "run"
    words = ["experiment=resnet18", "model=mlp", "trainer.max_steps=3", "loader.num_workers=0"]

    run = train([*words, "data.test=null", f"run_dir={run_dir}"])

    (hint,) = [line for line in run.out.splitlines() if line.startswith("evaluate")]
    program, *arguments = hint.split()
    assert program == "evaluate"
    assert arguments == [f"run={run_dir}", "split=val"]
    assert evaluate(arguments) == 0
    assert "val/accuracy" in capsys.readouterr().out
    found = json.loads((run_dir / "evaluation.json").read_text())
    assert found["split"] == "val"
    assert evaluate([f"run={run_dir}"]) == 0  # what is there is taken, and said
    assert "the data have no test split: split=val" in capsys.readouterr().err
