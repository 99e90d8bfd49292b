"""Words of other frameworks, and keys without their section, are answered with our key."""

import re

import pytest

from conf.check import check, dataclass_in
from conf.fields import declared, rule_of
from conf.other_words import KEYS, VALUES, our_key
from conf.schema import Config
from scripts.composition.compose import compose


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        pytest.param("lr", "optimizer.lr", id="no-section"),
        pytest.param("batch_size", "loader.batch_size", id="batch"),
        pytest.param("device", "strategy.accelerator", id="device"),
        pytest.param(
            "trainer.accumulate_grad_batches",
            "trainer.gradient_accumulation_steps",
            id="lightning",
        ),
        pytest.param("trainer.gradient_clip_val", "trainer.clip_grad_norm", id="clipping"),
        pytest.param("trainer.accelerator", "strategy.accelerator", id="accelerator"),
        pytest.param("max_epochs", "trainer.max_epochs", id="ours-elsewhere"),
    ],
)
def test_an_unknown_key_is_answered_with_ours(key, ours):
    config = compose([]).config
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = 1
    (problem,) = check(config)
    assert problem.key == key
    assert problem.hint.startswith(f"it is called {ours}")


@pytest.mark.parametrize(
    ("section", "name", "value", "ours"),
    [("strategy", "accelerator", "gpu", "cuda"), ("trainer", "precision", "bf16-mixed", "bf16")],
)
def test_a_value_is_answered_with_ours(section, name, value, ours):
    config = compose([]).config
    config[section][name] = value
    (problem,) = check(config)
    assert problem.hint == f"it is called {ours} here"


def test_no_key_is_answered_with_itself():
    assert our_key("optimizer.lr") is None
    assert our_key("data.num_classes") is None


def test_every_answer_is_a_key_that_exists():
    for answer in {*KEYS.values()}:
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
