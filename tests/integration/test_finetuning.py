"""Trained weights carried into another run, and averages of weights, from the command line."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

BASE = ["experiment=resnet18", "model=small_cnn", "trainer.log_every_n_steps=1"]
TUNED = [
    "experiment=resnet18",
    "model=finetune",
    "model@model.model=small_cnn",
    "trainer.log_every_n_steps=1",
]


@pytest.fixture(scope="module")
def base(train, tmp_path_factory):
    """A run of one epoch on all ten digits."""
    folder = tmp_path_factory.mktemp("base") / "run"
    run = train([*BASE, "trainer.max_epochs=1", f"run_dir={folder}"])
    assert run.code == 0, run.err
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Overrides for three of the digits as files: another number of classes."""
    root = tmp_path_factory.mktemp("three")
    images, labels = load_digits(return_X_y=True)
    for label in range(3):
        for number, pixels in enumerate(images[labels == label][:60]):
            split = ("train", "train", "val", "test")[number % 4]
            folder = root / split / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            picture = np.kron(pixels.reshape(8, 8) * 15.9, np.ones((2, 2))).astype(np.uint8)
            Image.fromarray(picture).save(folder / f"{number}.png")
    return [
        "data=image_folder",
        f"data.root={root}",
        "data.channels=1",
        "data.image_size=16",
        "data.mean=[0.3]",
        "data.std=[0.3]",
        "transforms=basic",
        "loader.batch_size=16",
    ]


def weights(folder, name="last"):
    payload = torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)
    return payload["model"]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last(folder, key):
    return [line[key] for line in lines(folder) if key in line][-1]


def test_a_run_s_weights_for_other_classes(train, evaluated, base, three, tmp_path) -> None:
    run_dir = tmp_path / "tuned"
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    line = [*TUNED, f"model.weights={moved}", *three, "trainer.max_epochs=2", f"run_dir={run_dir}"]
    run = train(line)
    assert run.code == 0, run.err
    log = (run_dir / "train.log").read_text()
    assert f"initial weights {moved}: 18 tensors loaded; resized: head.weight, head.bias" in log
    assert weights(run_dir)["head.weight"].shape[0] == 3

    # Once trained, a run needs neither the weights nor the network that it began from.
    shutil.rmtree(moved)
    again = evaluated(run_dir)
    assert again["test/accuracy"] == last(run_dir, "test/accuracy")
    assert again["test/loss"] == last(run_dir, "test/loss")
    more = [override for override in line if not override.startswith("trainer.max_epochs")]
    resumed = train([*more, "trainer.max_epochs=3", "resume=auto"])
    assert resumed.code == 0, resumed.err
    assert last(run_dir, "step") == 3 * 6


def test_frozen_parts_stay_as_they_were_loaded(train, base, tmp_path) -> None:
    run = train(
        [
            *TUNED,
            f"model.weights={base}",
            "optimizer/param_groups=frozen",
            "trainer.max_steps=3",
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    assert run.code == 0, run.err
    before, after = weights(base, "best"), weights(tmp_path / "run")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {name for name in moved if "running" not in name and "num_batches" not in name}
    assert trained == {"head.weight", "head.bias"}


def test_dropped_parts_begin_anew(train, base, tmp_path) -> None:
    run = train(
        [
            *TUNED,
            f"model.weights={base}",
            "model.drop=[features.2.*, head.*]",
            "optimizer.lr=0",
            "lr_scheduler=constant",
            "trainer.max_steps=1",
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    assert run.code == 0, run.err
    assert "dropped: features.2.conv.weight" in (tmp_path / "run" / "train.log").read_text()
    before, after = weights(base, "best"), weights(tmp_path / "run")
    names = [n for n in before if n.endswith(("weight", "bias")) and "bn" not in n]
    differ = {n for n in names if not torch.equal(before[n], after[n])}
    assert differ == {"features.2.conv.weight", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("overrides", "code", "named"),
    [
        pytest.param(["model@model.model=mlp"], 4, "head.weight has shape", id="another-network"),
        pytest.param(["model.drop=[tail.*]"], 2, "'tail.*' matches no name", id="no-such-name"),
        pytest.param(["model.model.widths=[16,32]"], 4, "model.drop", id="another-depth"),
        pytest.param(["model.weights=nowhere.pt"], 2, "model.weights", id="no-such-file"),
    ],
)
def test_weights_that_do_not_fit(train, base, tmp_path, overrides, code, named) -> None:
    line = [*TUNED, f"model.weights={base}", *overrides, f"run_dir={tmp_path / 'run'}"]
    run = train(line)
    assert run.code == code, run.err
    assert named in run.error
    assert not (tmp_path / "run").exists()


def test_one_side_may_have_names_of_its_own(train, base, tmp_path) -> None:
    overrides = ["model.model.widths=[16,32]", "model.drop=[head.*]", "model.strict=false"]
    run = train(
        [
            *TUNED,
            f"model.weights={base}",
            *overrides,
            "trainer.max_steps=1",
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    assert run.code == 0, run.err
    assert "unexpected: features.2.conv.weight" in (tmp_path / "run" / "train.log").read_text()


STAGES = "callbacks.unfreeze.stages={layer4: null, body: {pattern: 'features.*', epoch: 1}}"


def test_an_unfreeze_schedule_survives_a_resume(train, base, tmp_path) -> None:
    line = [
        *TUNED,
        f"model.weights={base}",
        "callbacks=[default,unfreeze]",
        STAGES,
        "trainer.max_epochs=2",
        "callbacks.checkpoint.every_n_steps=10",
        "callbacks.checkpoint.save_top_k=-1",
    ]
    whole = tmp_path / "whole"
    run = train([*line, f"run_dir={whole}"])
    assert run.code == 0, run.err
    assert "body trains from here on" in (whole / "train.log").read_text()
    before, first = weights(base, "best"), weights(whole, "step-00000020")
    body = [name for name in before if name.startswith("features")]
    assert all(torch.equal(before[name], first[name]) for name in body)  # BatchNorm's, too
    assert not any(torch.equal(first[n], weights(whole)[n]) for n in body if "num_batches" not in n)

    for step in (10, 30):  # frozen, and no longer
        resumed = tmp_path / f"from-{step}"
        checkpoint = whole / "checkpoints" / f"step-{step:08d}.pt"
        run = train([*line, f"resume={checkpoint}", f"run_dir={resumed}"])
        assert run.code == 0, run.err
        for name, value in weights(whole).items():
            assert torch.equal(value, weights(resumed)[name]), name


@pytest.mark.parametrize(
    ("callback", "overrides"),
    [
        pytest.param("ema", ["callbacks.ema.decay=0.9"], id="ema"),
        pytest.param("swa", ["callbacks.swa.start_epoch=1"], id="swa"),
    ],
)
def test_an_average_is_what_is_evaluated(train, evaluated, tmp_path, callback, overrides) -> None:
    run_dir = tmp_path / "run"
    common = [*BASE, "trainer.max_epochs=3", "callbacks.checkpoint.save_weights=true"]
    run = train([*common, f"callbacks=[default,{callback}]", *overrides, f"run_dir={run_dir}"])
    assert run.code == 0, run.err
    assert f"the average of callbacks.{callback}" in run.out
    plain = train([*common, f"run_dir={tmp_path / 'plain'}"])
    assert plain.code == 0, plain.err
    # The same training, evaluated with other weights.
    assert last(run_dir, "train/loss") == last(tmp_path / "plain", "train/loss")
    assert last(run_dir, "val/loss") != last(tmp_path / "plain", "val/loss")
    # Validated, saved for others and tested: always the average.
    assert evaluated(run_dir)["test/loss"] == last(run_dir, "test/loss")
    again = evaluated(run_dir, "split=val", "checkpoint=last")
    assert again["val/loss"] == last(run_dir, "val/loss")

    tuned = tmp_path / "tuned"
    line = [*TUNED, f"model.weights={run_dir}", "optimizer.lr=0", "lr_scheduler=constant"]
    run = train([*line, "trainer.max_steps=1", "model.checkpoint=last", f"run_dir={tuned}"])
    assert run.code == 0, run.err
    assert "loading the average of the weights" in (tuned / "train.log").read_text()
    average, given = weights(run_dir)["head.weight"], weights(tuned)["head.weight"]
    assert not torch.equal(average, given)


def test_two_averages_cannot_both_be_evaluated(train, tmp_path) -> None:
    both = [*BASE, "callbacks=[default,ema,swa]", f"run_dir={tmp_path / 'run'}"]
    run = train([*both, "trainer.max_steps=2"])
    assert run.code == 2, run.err
    assert "callbacks.ema and callbacks.swa" in run.error
    assert not (tmp_path / "run").exists()
    run = train([*both, "trainer.max_epochs=2", "callbacks.ema.use_for_evaluation=false"])
    assert run.code == 0, run.err
    assert "the average of callbacks.swa" in run.out
