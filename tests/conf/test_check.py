"""The schema held against plain trees."""

import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import _inductor

from conf.check import check, fill_defaults, parse
from conf.errors import ConfigError, Problem
from conf.fields import dataclass_in, declared, rule_of
from conf.other_words import _OURS, VALUES, our_key
from conf.schema import Config, EvalLoaderConfig, LoaderConfig
from conf.schema_trainer import CompileWords, StrategyConfig, TrainerConfig

CONF = Path(__file__).resolve().parents[2] / "conf"


def tree(**changed: Any) -> dict[str, Any]:
    sound = {
        "name": "run",
        "model": {"_target_": "models.m"},
        "data": {},
        "task": {"_target_": "trainer.t"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    }
    return {**sound, **changed}


def keys(raw: dict[str, Any]) -> list[str]:
    return [problem.key for problem in check(raw)]


def test_a_sound_tree_becomes_dataclasses_with_their_defaults() -> None:
    config = parse(tree(trainer={"max_epochs": 3}, data={"image_size": 8}))
    assert (config.trainer.max_epochs, config.trainer.precision) == (3, "fp32")
    assert config.data.extra == {"image_size": 8}
    assert config.loader == LoaderConfig()
    assert config.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.1}


@pytest.mark.parametrize("target", ["mine.Samples", "data.sources.Digits"])
def test_free_keys_of_data_are_checked_where_the_data_set_is_ours(target: str) -> None:
    given = {"train": {"_target_": target}, "image_size": None, "channels": "rgb"}
    found = keys(tree(data={**given, "val_fraction": 2}))
    assert found == ([] if target.startswith("mine") else ["data.channels", "data.val_fraction"])


def test_parse_raises_all_mistakes() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tree(seed="x", trainer={"max_epochs": 0}))
    assert [p.key for p in caught.value.problems] == ["seed", "trainer.max_epochs"]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        pytest.param("trainer", "max_time", 3, id="an-integer-is-a-number"),
        pytest.param("trainer", "max_time", "10:00:00", id="a-duration"),
        pytest.param("trainer", "clip_grad_norm_type", math.inf, id="the-largest-entry"),
        pytest.param("trainer", "limit_train_batches", 0.1, id="a-fraction"),
        pytest.param("trainer", "limit_train_batches", 7, id="a-count"),
        pytest.param("trainer", "limit_val_batches", 0, id="no-validation"),
        pytest.param("trainer", "compile", {"mode": "default"}, id="options"),
        pytest.param("trainer", "gradient_noise", {"eta": 0.1}, id="part-of-an-optional-section"),
        pytest.param("strategy", "devices", [2], id="device-numbers"),
        pytest.param("strategy", "devices", "auto", id="auto"),
        pytest.param("loader", "sampler", {"_target_": "data.s"}, id="a-node"),
    ],
)
def test_what_a_key_may_hold(section: str, key: str, value: object) -> None:
    assert check(tree(**{section: {key: value}})) == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        pytest.param("trainer", "max_time", math.nan, id="nan"),
        pytest.param("trainer", "max_time", math.inf, id="infinite"),
        pytest.param("trainer", "max_epochs", True, id="true-is-no-integer"),
        pytest.param("trainer", "channels_last", 1, id="one-is-no-truth"),
        pytest.param("trainer", "channels_last", "no", id="text-is-no-truth"),
        pytest.param("trainer", "precision", False, id="no-is-no-choice"),
        pytest.param("trainer", "limit_train_batches", True, id="true-is-no-count"),
        pytest.param("trainer", "activation_checkpointing", [1], id="items"),
        pytest.param("strategy", "devices", [-1], id="negative-device"),
        pytest.param("loader", "sampler", {"x": 1}, id="a-node-without-target"),
        pytest.param("loader", "batch_size", "???", id="missing"),
        pytest.param("data", "num_classes", 0, id="no-classes"),
    ],
)
def test_what_a_key_may_not_hold(section: str, key: str, value: object) -> None:
    found = keys(tree(**{section: {key: value}}))
    assert [k for k in found if k.startswith(f"{section}.{key}")] == found != []


def test_known_words_of_open_nodes_are_checked_and_others_are_not() -> None:
    optimizer = {"lr": "fast", "mine": 1, "optimizers": {"a": {"lr": -1}, "b": {"other": 2}}}
    assert keys(tree(optimizer=optimizer)) == ["optimizer.lr", "optimizer.optimizers.a.lr"]


def test_what_is_left_open_is_found_anywhere() -> None:
    raw = tree(model={"_target_": "models.m", "sizes": [1, "???"], "rate": math.nan})
    assert keys(raw) == ["model.sizes.1", "model.rate"]


def test_a_key_without_effect_is_a_mistake_and_its_default_is_not() -> None:
    assert keys(tree(strategy={"name": "single", "bucket_cap_mb": 1.0})) == [
        "strategy.bucket_cap_mb"
    ]
    assert keys(tree(strategy={"name": "single", "broadcast_buffers": True})) == []


def test_defaults_fill_what_was_left_out_and_nothing_that_has_no_effect() -> None:
    filled = fill_defaults(tree(strategy={"name": "dp"}, loader={"batch_size": 3}))
    assert filled["loader"]["batch_size"] == 3
    assert filled["loader"]["timeout"] == 600.0
    assert set(filled["strategy"]) == {
        "name", "accelerator", "devices", "device_ids", "output_device", "dim",
    }  # fmt: skip
    assert list(filled)[:3] == ["name", "seed", "run_dir"]


def test_defaults_leave_what_is_no_section_to_the_check() -> None:
    filled = fill_defaults({"trainer": 3, "zz": 1})
    assert (filled["trainer"], filled["zz"]) == (3, 1)


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        pytest.param("trainer/default.yaml", TrainerConfig, id="trainer"),
        pytest.param("loader/default.yaml", LoaderConfig, id="loader"),
        *(pytest.param(f"strategy/{n}.yaml", StrategyConfig, id=n) for n in ("dp", "ddp", "fsdp")),
    ],
)
def test_a_shipped_group_shows_every_key_with_its_default(file: str, schema: type) -> None:
    shipped = yaml.safe_load((CONF / file).read_text())
    given = {"name": shipped["name"]} if "name" in shipped else {}
    section = "strategy" if "name" in shipped else file.split("/")[0]
    expected = fill_defaults({section: given})[section]
    if section == "loader":
        assert set(shipped.pop("eval")) <= set(declared(EvalLoaderConfig))
        expected.pop("eval")
    assert shipped == expected
    assert [rule_of(one).doc for one in declared(schema).values() if not rule_of(one).doc] == []


def test_an_error_survives_the_way_between_processes() -> None:
    import pickle

    error = ConfigError([Problem("a", "b", "c", "file.yaml:3")])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == "a: b; c [file.yaml:3]"


def test_a_message_stays_one_line_whatever_it_quotes() -> None:
    text = str(ConfigError([Problem("a\nb", "c\x1b[31m\r", "d\u2028e")]))
    assert text.isprintable()


def test_every_key_of_the_root_is_a_field_of_config() -> None:
    shipped = yaml.safe_load((CONF / "train.yaml").read_text())
    assert set(shipped) - {"defaults"} <= set(declared(Config))


def test_no_key_is_answered_with_itself():
    assert our_key("optimizer.lr") is None
    assert our_key("data.num_classes") is None


def test_every_answer_is_a_key_that_exists():
    for answer in {*_OURS.values()}:
        for key in re.findall(r"\b(?:trainer|loader|strategy|data)\.\w+", answer):
            section, name = key.split(".")
            hint = dataclass_in(Config.__annotations__[section])
            # An open section has further keys of its own.
            assert (
                name in declared(hint)
                or rule_of(declared(Config)[section]).node
                or name in ("image_size",)
            ), key
    assert set(VALUES.values()) <= {"cuda", "fp16", "bf16", "bf16_true", "fp32", "fp64"}


def test_the_modes_are_torchs() -> None:
    words = typing.get_args(typing.get_type_hints(CompileWords)["mode"])[0]
    assert set(typing.get_args(words)) <= set(_inductor.list_mode_options())
    assert TrainerConfig().compile is False
