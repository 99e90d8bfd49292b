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
    (new,) = more.values()
    assert changes(before, later) == ({} if key is None else {key: (ABSENT, new)})
    assert changes(later, before) == ({} if key is None else {key: (new, ABSENT)})


def test_an_order_of_transforms_and_what_is_empty_within_an_argument_are_values():
    first = {"transforms": {"train": {"a": {}, "b": {}}}}
    second = {"transforms": {"train": {"b": {}, "a": {}}}}
    assert [*changes(first, second)] == ["transforms.train (order)"]
    before, after = ({"model": RUN["model"] | {"activation": given}} for given in ({}, {"a": None}))
    assert changes(before, after) == {"model.activation.a": (ABSENT, None)}


def test_a_mirror_is_fetched_over_no_file_of_others(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    content = {"model": {"w": torch.tensor([5.0])}, "state": {"step": 5}}
    CheckpointStore(run / "checkpoints").save(content, step=5)
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
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
    saved, raw = {"strategy": STRATEGIES[before]}, {"strategy": STRATEGIES[now]}
    for key in ("strategy._target_", "strategy.devices"):
        assert _is_harmless(key, saved, raw) is harmless


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        pytest.param("ddp comm_hook=fp16_compress", "ddp", "comm_hook", id="compressed"),
        pytest.param("ddp", "ddp comm_hook=powersgd", "comm_hook", id="compressed-now"),
        pytest.param("ddp comm_hook=fp16_compress", "single", "comm_hook", id="compressed-alone"),
        pytest.param("fsdp mixed_precision=bf16", "fsdp", "mixed_precision", id="format"),
        pytest.param("fsdp", "fsdp mixed_precision=bf16", "mixed_precision", id="format-now"),
        pytest.param("fsdp mixed_precision=bf16", "ddp", "mixed_precision", id="format-whole"),
        pytest.param("ddp", "ddp sync_batchnorm=true", "sync_batchnorm", id="statistics"),
        pytest.param("ddp", "ddp broadcast_buffers=false", "broadcast_buffers", id="buffers"),
        pytest.param("ddp sync_batchnorm=true", "single", None, id="statistics-alone"),
        pytest.param("ddp", "fsdp wrap_modules=[Linear]", None, id="sharded"),
        pytest.param("fsdp cpu_offload=true", "single", None, id="alone"),
        pytest.param("single", "ddp devices=2 bucket_cap_mb=1", None, id="more-devices"),
        pytest.param("ddp comm_hook=fp16_compress", "ddp comm_hook=fp16_compress", None, id="same"),
    ],
)
def test_a_key_of_a_strategy_that_changes_the_numbers_is_no_harmless_one(before, now, refused):
    def configured(words):
        name, *keys = words.split()
        return compose(
            ["experiment=resnet18", f"strategy={name}", *(f"strategy.{key}" for key in keys)]
        ).config

    saved = configured(before)
    raw = configured(now)
    harmful = [key for key in changes(saved, raw) if not _is_harmless(key, saved, raw)]
    assert harmful == ([f"strategy.{refused}"] if refused else [])
    assert refused is None or not trains_the_same(f"strategy.{refused}")  # told in the manual
    for key in ("strategy", "strategy._target_", "strategy.devices", "trainer.compile.mode"):
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
    assert [*changes(before, later)] == ["optimizer.lr"]
    assert set(asked) == {"torch.optim.SGD"}
    assert changes({"lr": 1}, {"lr": True}) == {"lr": (1, True)}  # equal, but for their types
