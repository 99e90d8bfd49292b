"""What differs from the run that is resumed, and which run is selected."""

from __future__ import annotations

import pytest
import torch

from regimen.callbacks.early_stopping import EarlyStopping
from regimen.conf.check import with_defaults
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.scripts.composition.overrides import trains_the_same
from regimen.scripts.runs.resume import ABSENT, _is_harmless, changes, find_resume
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import CheckpointError

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
    before = with_defaults(RUN)
    later = with_defaults(RUN | {part: RUN[part] | more})

    added = changes(before, later)
    removed = changes(later, before)

    if key is None:
        assert added == {}
        assert removed == {}
    else:
        (new,) = more.values()
        assert added == {key: (ABSENT, new)}
        assert removed == {key: (new, ABSENT)}


def test_an_order_of_transforms_is_a_value():
    first = {"transforms": {"train": {"a": {}, "b": {}}}}
    second = {"transforms": {"train": {"b": {}, "a": {}}}}

    assert list(changes(first, second)) == ["transforms.train (order)"]


def test_what_is_empty_within_an_argument_is_a_value():
    before = {"model": RUN["model"] | {"activation": {}}}
    after = {"model": RUN["model"] | {"activation": {"a": None}}}

    assert changes(before, after) == {"model.activation.a": (ABSENT, None)}


@pytest.fixture
def mirrored(tmp_path):
    """A run of one checkpoint, whose weights are of no run that is known here."""
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    content = {"model": {"w": torch.tensor([5.0])}, "state": {"step": 5}}
    CheckpointStore(checkpoints).save(content, step=5)
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    (run / "manifest.json").write_text("{}")
    return run


def resume_from(run, run_dir):
    return {"resume": f"file://{run}", "run_dir": str(run_dir), "name": "x", "dry_run": False}


def test_a_mirror_is_fetched_over_no_file_of_others(mirrored, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.yaml").write_text("mine: 1")

    with pytest.raises(ConfigError, match=r"holds config\.yaml, and no run"):
        find_resume(resume_from(mirrored, project))

    assert [path.name for path in project.iterdir()] == ["config.yaml"]


def test_a_mirror_is_fetched_where_a_try_was_killed_that_had_begun_to_fetch(mirrored, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / ".lock").touch()
    metrics = project / "metrics.jsonl"
    metrics.write_text("half")

    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):  # of these tests
        find_resume(resume_from(mirrored, project))

    assert metrics.read_text() == (mirrored / "metrics.jsonl").read_text()


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
    without = {"callbacks": {}}
    with_it = {"callbacks": {"mine": {"_target_": target, "every_n_epochs": 2}}}

    for saved, raw in ((with_it, without), (without, with_it), (with_it, with_it)):
        for key in ("callbacks.mine", "callbacks.mine.every_n_epochs"):
            assert _is_harmless(key, saved, raw) is harmless


STRATEGIES = {
    "single": {"_target_": "regimen.trainer.strategies.single.Single"},
    "ddp": {"_target_": "regimen.trainer.strategies.ddp.DDP", "devices": 2},
    "fsdp": {"_target_": "regimen.trainer.strategies.fsdp.FSDP", "devices": 2},
    "gone": {"_target_": "nowhere.Hogwild"},
}


@pytest.mark.parametrize(
    ("before", "now", "harmless"),
    [
        ("single", "ddp", True),
        ("ddp", "fsdp", False),
        ("fsdp", "single", False),
        ("gone", "ddp", False),
    ],
)
def test_a_strategy_may_say_that_another_training_comes_out(before, now, harmless, monkeypatch):
    monkeypatch.setattr("regimen.trainer.strategies.fsdp.FSDP.affects_result", True)
    saved = {"strategy": STRATEGIES[before]}
    raw = {"strategy": STRATEGIES[now]}
    for key in ("strategy._target_", "strategy.devices"):
        assert _is_harmless(key, saved, raw) is harmless


def test_a_key_that_nobody_declares_harmless_is_none():
    without = {"callbacks": {}}

    assert not _is_harmless("callbacks.other", without, without)
    assert not _is_harmless("optimizer.lr", without, without)


def configured(words):
    """Return the configuration with a strategy and its keys, all in one text."""
    name, *keys = words.split()
    overrides = [f"strategy.{key}" for key in keys]
    return compose(["experiment=resnet18", f"strategy={name}", *overrides]).config


COMPRESSED = "ddp comm_hook=fp16_compress"


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        pytest.param(COMPRESSED, "ddp", "comm_hook", id="compressed"),
        pytest.param("ddp", "ddp comm_hook=powersgd", "comm_hook", id="compressed-now"),
        pytest.param(COMPRESSED, "single", "comm_hook", id="compressed-alone"),
        pytest.param("fsdp mixed_precision=bf16", "fsdp", "mixed_precision", id="format"),
        pytest.param("fsdp", "fsdp mixed_precision=bf16", "mixed_precision", id="format-now"),
        pytest.param("fsdp mixed_precision=bf16", "ddp", "mixed_precision", id="format-whole"),
        pytest.param("ddp", "ddp sync_batchnorm=true", "sync_batchnorm", id="statistics"),
        pytest.param("ddp", "ddp broadcast_buffers=false", "broadcast_buffers", id="buffers"),
    ],
)
def test_a_key_of_a_strategy_that_changes_the_numbers_is_no_harmless_one(before, now, refused):
    key = f"strategy.{refused}"

    assert harmful_changes(configured(before), configured(now)) == [key]
    assert not trains_the_same(key)  # told in the manual


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param("ddp sync_batchnorm=true", "single", id="statistics-alone"),
        pytest.param("ddp", "fsdp wrap_modules=[Linear]", id="sharded"),
        pytest.param("fsdp cpu_offload=true", "single", id="alone"),
        pytest.param("single", "ddp devices=2 bucket_cap_mb=1", id="more-devices"),
        pytest.param(COMPRESSED, COMPRESSED, id="same"),
    ],
)
def test_another_strategy_that_computes_the_same_is_harmless(before, now):
    assert harmful_changes(configured(before), configured(now)) == []


def harmful_changes(saved, raw):
    return [key for key in changes(saved, raw) if not _is_harmless(key, saved, raw)]


@pytest.mark.parametrize(
    "key", ["strategy", "strategy._target_", "strategy.devices", "trainer.compile.mode"]
)
def test_how_a_run_is_computed_trains_the_same(key):
    assert trains_the_same(key)


def test_the_targets_of_what_is_equal_are_not_looked_at(monkeypatch):
    asked = []

    def parameters_of(path):
        asked.append(path)

    monkeypatch.setattr("regimen.trainer.targets.instantiate.parameters_of", parameters_of)
    before = with_defaults(RUN)
    later = with_defaults(RUN)

    assert changes(before, later) == {}
    assert asked == []
    later["optimizer"] = later["optimizer"] | {"lr": 0.2}
    assert list(changes(before, later)) == ["optimizer.lr"]
    assert set(asked) == {"torch.optim.SGD"}


def test_equal_values_of_other_types_are_a_change():
    assert changes({"lr": 1}, {"lr": True}) == {"lr": (1, True)}
