"""A run of adapters whose base is elsewhere, another one or gone: every command says so (L5)."""

import csv
import hashlib
import json
import shutil

import pytest
import torch

pytest.importorskip("peft", reason="the extra peft is not installed")

from regimen import load_run
from regimen.trainer.errors import CheckpointError
from same_run import logged, state_of
from toy_chat import conversations, write_model, write_rows

FEW = [
    *("experiment=chat", "data.context=128", "loader.batch_size=8", "trainer.max_epochs=2"),
    *("callbacks=[default,ema]", "callbacks.ema.decay=0.5", "trainer.log_every_n_steps=1"),
    *("callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.save_top_k=-1"),
]
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def root(train, tmp_path_factory):
    """A folder with a run, and its base, which was moved from `model` to `moved` since."""
    root = tmp_path_factory.mktemp("borrowed")
    write_model(root / "model")
    write_rows(root / "data/train.jsonl", conversations(40))
    write_rows(root / "data/val.jsonl", conversations(12, 50))
    train([*line(root, "model"), f"run_dir={root / 'run'}"])
    (root / "model").rename(root / "moved")
    return root


@pytest.fixture(scope="module")
def other(root):
    """The base with another byte."""
    shutil.copytree(root / "moved", root / "other")
    content = bytearray((root / "other" / FILE).read_bytes())
    content[-1] ^= 1
    (root / "other" / FILE).write_bytes(content)
    return root / "other"


@pytest.fixture(scope="module")
def whole(root, train):
    """The last checkpoint with the weights that it borrows."""
    path = root / "whole.pt"
    words = [str(root / "run/checkpoints/last.pt"), str(path), f"model.name={root / 'moved'}"]
    train([*words, "--whole"], command="convert")
    return path


def line(root, model):
    return [*FEW, f"model.name={root / model}", f"data.root={root / 'data'}"]


def digest(folder):
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


def last_validation(root):
    entry = [entry for entry in logged(root / "run") if "val/loss" in entry][-1]
    return {key: value for key, value in entry.items() if key.startswith("val/")}


def test_a_checkpoint_holds_the_adapters_and_names_the_rest(root):
    path = root / "run/checkpoints/last.pt"
    payload = torch.load(path, weights_only=True)
    (entry,) = payload["borrowed"]
    assert (entry["folder"], entry["sha256"]) == (str(root / "model"), digest(root / "moved"))
    for weights in (payload["model"], payload["ema"]["model"]):
        assert weights
        assert all("lora_" in name for name in weights)
    log = (root / "run/train.log").read_text()
    assert f"frozen weights, which are read again from {root / 'model'}" in log


def test_it_is_small_beside_one_that_holds_all(root, whole):
    base = (root / "moved" / FILE).stat().st_size
    assert (root / "run/checkpoints/last.pt").stat().st_size < whole.stat().st_size - base


def test_the_plan_says_what_is_left_out(train, root, tmp_path):
    plan = train([*line(root, "moved"), "dry_run=true", f"run_dir={tmp_path / 'run'}"]).out
    assert "checkpoints leave out 21 frozen weights" in plan


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "train"])
def test_a_base_that_is_gone_is_named_with_the_way_out(train, root, tmp_path, command):
    words = [f"run={root / 'run'}"]
    if command == "predict":
        words += ["source=val", "save=logits", f"out={tmp_path / 'out.csv'}"]
    if command == "export":
        words += ["format=safetensors", f"out={tmp_path / 'out'}"]
    if command == "train":
        words = [*line(root, "model"), f"run_dir={root / 'run'}", "resume=auto"]
    error = train(words, 4, command=command).error
    assert str(root / "model") in error
    assert digest(root / "moved") in error
    assert "model.name=DIR" in error


def test_a_base_without_its_weights_is_named_too(train, root, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(root / "moved", bare, ignore=shutil.ignore_patterns(FILE))
    run = tmp_path / "run"
    shutil.copytree(root / "run", run)
    words = [f"run={run}", f"model.name={bare}", "split=val"]
    error = train(words, 4, command="evaluate").error
    assert str(bare) in error
    assert FILE in error


def test_another_base_is_refused_with_both_hashes(train, root, other, tmp_path):
    before = (root / "run/checkpoints/last.pt").read_bytes()
    resumed = [*line(root, "other"), f"run_dir={root / 'run'}", "resume=auto"]
    for words, command in (
        ([f"run={root / 'run'}", f"model.name={other}"], "evaluate"),
        ([*resumed, "trainer.max_epochs=3"], "train"),
    ):
        error = train(words, 4, command=command).error
        assert digest(root / "moved") in error
        assert digest(other) in error
    with pytest.raises(CheckpointError, match=digest(other)):
        load_run(root / "run", "cpu", moved={"model.name": str(other)}).model()
    assert (root / "run/checkpoints/last.pt").read_bytes() == before


def test_an_evaluation_is_the_last_validation(evaluated, root):
    moved = f"model.name={root / 'moved'}"
    found = evaluated(root / "run", "split=val", "checkpoint=last", moved)
    expected = last_validation(root)
    assert expected == {key: found[key] for key in expected}


def test_a_resume_with_the_base_elsewhere_is_exact(train, root, tmp_path):
    run = tmp_path / "run"
    checkpoint = f"resume={root / 'run/checkpoints/step-00000003.pt'}"
    train([*line(root, "moved"), checkpoint, f"run_dir={run}"])
    ours = state_of(run)
    theirs = state_of(root / "run")
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert differing == {"config", "borrowed.0.folder", "borrowed.0.name"}


def test_what_uses_a_run_takes_the_base_from_elsewhere(train, root, whole, tmp_path):
    moved = f"model.name={root / 'moved'}"
    run = f"run={root / 'run'}"
    model = load_run(root / "run", "cpu", moved={"model.name": str(root / "moved")}).model("last")
    expected = model.state_dict()
    payload = torch.load(whole, weights_only=True)
    assert "borrowed" not in payload
    assert payload["ema"]["model"].keys() == payload["model"].keys() == expected.keys()
    for name, value in payload["ema"]["model"].items():
        assert torch.equal(value, expected[name])

    out = tmp_path / "out"
    words = [run, "format=safetensors", "checkpoint=last", f"out={out}", moved]
    train(words, command="export")
    from safetensors.torch import load_file

    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in exported.items())
    assert exported.keys() == expected.keys()

    answers = tmp_path / "answers.csv"
    words = [run, "source=val", "save=logits", f"out={answers}", moved]
    train(words, command="predict")
    assert list(csv.DictReader(answers.open()))


def test_a_whole_checkpoint_needs_no_weights_beside_it(train, root, whole, tmp_path):
    bare = tmp_path / "bare"  # the configuration and the tokenizer
    shutil.copytree(root / "moved", bare, ignore=shutil.ignore_patterns(FILE))
    run = tmp_path / "run"
    shutil.copytree(root / "run", run)
    words = [f"run={run}", "split=val", f"checkpoint={whole}", f"model.name={bare}"]
    train(words, command="evaluate")
    found = json.loads((run / "evaluation.json").read_text())
    expected = last_validation(root)
    assert expected == {key: found[key] for key in expected}
    resumed = tmp_path / "resumed"
    given = [*line(root, bare), f"resume={whole}", f"run_dir={resumed}", "trainer.max_epochs=3"]
    train([*given, "resume_policy=override"])
    assert "borrowed" not in torch.load(resumed / "checkpoints/last.pt", weights_only=True)


@pytest.mark.slow
def test_two_processes_borrow_as_one_does(train, root, tmp_path):
    run = tmp_path / "run"
    two = ["strategy=ddp", "strategy.devices=2"]
    train([*line(root, "moved"), *two, f"run_dir={run}"])
    payload = torch.load(run / "checkpoints/last.pt", weights_only=True)
    assert all("lora_" in name for name in payload["model"])
    train([*line(root, "moved"), *two, f"run_dir={run}", "resume=auto", "trainer.max_epochs=3"])
