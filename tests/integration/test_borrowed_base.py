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
    "experiment=chat",
    "data.context=128",
    "loader.batch_size=8",
    "trainer.max_epochs=2",
    "callbacks=[default,ema]",
    "callbacks.ema.decay=0.5",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_steps=3",
    "callbacks.checkpoint.save_top_k=-1",
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
    folder = root / "other"
    shutil.copytree(root / "moved", folder)
    content = bytearray((folder / FILE).read_bytes())
    content[-1] ^= 1
    (folder / FILE).write_bytes(content)
    return folder


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
    entries = [entry for entry in logged(root / "run") if "val/loss" in entry]
    return {key: value for key, value in entries[-1].items() if key.startswith("val/")}


def load(path):
    return torch.load(path, weights_only=True)


def assert_adapters_alone(weights):
    assert weights
    for name in weights:
        assert "lora_" in name


def test_a_checkpoint_holds_the_adapters_and_names_the_rest(root):
    payload = load(root / "run/checkpoints/last.pt")

    (entry,) = payload["borrowed"]
    assert entry["folder"] == str(root / "model")
    assert entry["sha256"] == digest(root / "moved")
    assert_adapters_alone(payload["model"])
    assert_adapters_alone(payload["ema"]["model"])
    log = (root / "run/train.log").read_text()
    assert f"frozen weights, which are read again from {root / 'model'}" in log


def test_it_is_small_beside_one_that_holds_all(root, whole):
    base = (root / "moved" / FILE).stat().st_size
    adapters = (root / "run/checkpoints/last.pt").stat().st_size
    assert adapters < whole.stat().st_size - base


def test_the_plan_says_what_is_left_out(train, root, tmp_path):
    plan = train([*line(root, "moved"), "dry_run=true", f"run_dir={tmp_path / 'run'}"]).out
    assert "checkpoints leave out 21 frozen weights" in plan


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "train"])
def test_a_base_that_is_gone_is_named_with_the_way_out(train, root, tmp_path, command):
    run = root / "run"
    words = {
        "evaluate": [f"run={run}"],
        "predict": [f"run={run}", "source=val", "save=logits", f"out={tmp_path / 'out.csv'}"],
        "export": [f"run={run}", "format=safetensors", f"out={tmp_path / 'out'}"],
        "train": [*line(root, "model"), f"run_dir={run}", "resume=auto"],
    }

    error = train(words[command], 4, command=command).error

    assert str(root / "model") in error
    assert digest(root / "moved") in error
    assert "model.name=DIR" in error


def test_a_base_without_its_weights_is_named_too(train, root, tmp_path):
    bare = without_weights(root / "moved", tmp_path)
    run = shutil.copytree(root / "run", tmp_path / "run")

    error = train([f"run={run}", f"model.name={bare}", "split=val"], 4, command="evaluate").error

    assert str(bare) in error
    assert FILE in error


def without_weights(base, folder):
    """Copy the configuration and the tokenizer of a base."""
    return shutil.copytree(base, folder / "bare", ignore=shutil.ignore_patterns(FILE))


def test_another_base_is_refused_with_both_hashes(train, root, other):
    run = root / "run"
    last = run / "checkpoints/last.pt"
    before = last.read_bytes()
    resumed = [*line(root, "other"), f"run_dir={run}", "resume=auto", "trainer.max_epochs=3"]

    evaluation = train([f"run={run}", f"model.name={other}"], 4, command="evaluate")
    training = train(resumed, 4)

    for refused in (evaluation, training):
        assert digest(root / "moved") in refused.error
        assert digest(other) in refused.error
    with pytest.raises(CheckpointError, match=digest(other)):
        load_run(run, "cpu", moved={"model.name": str(other)}).model()
    assert last.read_bytes() == before


def test_an_evaluation_is_the_last_validation(evaluated, root):
    moved = f"model.name={root / 'moved'}"

    found = evaluated(root / "run", "split=val", "checkpoint=last", moved)

    assert last_validation(root).items() <= found.items()


def test_a_resume_with_the_base_elsewhere_is_exact(train, root, tmp_path):
    run = tmp_path / "run"
    checkpoint = root / "run/checkpoints/step-00000003.pt"

    train([*line(root, "moved"), f"resume={checkpoint}", f"run_dir={run}"])

    ours = state_of(run)
    theirs = state_of(root / "run")
    keys = ours.keys() | theirs.keys()
    differing = {key for key in keys if ours.get(key) != theirs.get(key)}
    assert differing == {"config", "borrowed.0.folder", "borrowed.0.name"}


@pytest.fixture
def averaged(root):
    """The weights of the run's average, with the base from elsewhere."""
    run = load_run(root / "run", "cpu", moved={"model.name": str(root / "moved")})
    return run.model("last").state_dict()


def test_a_whole_checkpoint_holds_the_weights_that_it_borrowed(whole, averaged):
    payload = load(whole)

    assert "borrowed" not in payload
    weights = payload["ema"]["model"]
    assert weights.keys() == payload["model"].keys() == averaged.keys()
    for name, value in weights.items():
        assert torch.equal(value, averaged[name])


def test_an_export_takes_the_base_from_elsewhere(train, root, averaged, tmp_path):
    from safetensors.torch import load_file

    out = tmp_path / "out"
    words = [f"run={root / 'run'}", "format=safetensors", "checkpoint=last", f"out={out}"]

    train([*words, f"model.name={root / 'moved'}"], command="export")

    exported = load_file(out / "model.safetensors")
    assert exported.keys() == averaged.keys()
    for name, value in exported.items():
        assert torch.equal(value, averaged[name])


def test_a_prediction_takes_the_base_from_elsewhere(train, root, tmp_path):
    out = tmp_path / "answers.csv"
    words = [f"run={root / 'run'}", "source=val", "save=logits", f"out={out}"]

    train([*words, f"model.name={root / 'moved'}"], command="predict")

    with out.open() as file:
        assert list(csv.DictReader(file))


def test_an_evaluation_of_a_whole_checkpoint_needs_no_weights_beside_it(
    train, root, whole, tmp_path
):
    bare = without_weights(root / "moved", tmp_path)
    run = shutil.copytree(root / "run", tmp_path / "run")
    words = [f"run={run}", "split=val", f"checkpoint={whole}", f"model.name={bare}"]

    train(words, command="evaluate")

    found = json.loads((run / "evaluation.json").read_text())
    assert last_validation(root).items() <= found.items()


def test_a_resume_of_a_whole_checkpoint_needs_no_weights_beside_it(train, root, whole, tmp_path):
    bare = without_weights(root / "moved", tmp_path)
    resumed = tmp_path / "resumed"
    words = [*line(root, bare), f"resume={whole}", f"run_dir={resumed}", "trainer.max_epochs=3"]

    train([*words, "resume_policy=override"])

    assert "borrowed" not in load(resumed / "checkpoints/last.pt")


@pytest.mark.slow
def test_two_processes_borrow_as_one_does(train, root, tmp_path):
    run = tmp_path / "run"
    words = [*line(root, "moved"), "strategy=ddp", "strategy.devices=2", f"run_dir={run}"]

    train(words)

    assert_adapters_alone(load(run / "checkpoints/last.pt")["model"])
    train([*words, "resume=auto", "trainer.max_epochs=3"])
