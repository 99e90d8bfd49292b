"""Each key of `trainer` works, or is refused by its name, with LBFGS, sharded, and in turns."""

from dataclasses import fields
from functools import partial

import pytest

import toys
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.conf.schema_trainer import TrainerConfig
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import build
from regimen.trainer.errors import RunError
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.strategies.strategy import Strategy

# A value of each key that is not its default.
VALUES = {
    "max_epochs": "2",
    "max_steps": "3",
    "max_time": "60.0",
    "precision": "bf16",
    "gradient_accumulation_steps": "2",
    "memory_limit": "4.0",
    "on_nonfinite": "skip",
    "max_skipped_in_a_row": "3",
    "clip_grad_norm": "1.0",
    "clip_grad_norm_type": "1.0",
    "clip_grad_per_group": "true",
    "clip_grad_value": "0.5",
    "error_if_nonfinite": "true",
    "gradient_noise": "{eta: 0.01}",
    "activation_checkpointing": "['*1']",
    "activation_checkpointing_segments": "2",
    "compile": "{backend: eager}",
    "channels_last": "true",
    "tf32": "true",
    "cudnn_benchmark": "true",
    "deterministic": "true",
    "detect_anomaly": "true",
    "log_every_n_steps": "1",
    "validate_every_n_epochs": "null",
    "validate_every_n_steps": "2",
    "validate_at_start": "1",
    "limit_train_batches": "2",
    "limit_val_batches": "1",
    "limit_test_batches": "1",
    "overfit_batches": "1",
}
TOGETHER = {  # keys that say something together with another one only
    "clip_grad_per_group": ["trainer.clip_grad_norm=1.0"],
    "memory_limit": ["trainer.gradient_accumulation_steps=auto"],
}
FORMATS = TrainerConfig.__annotations__["precision"].__args__
SHORT = [
    *("callbacks=none", "trainer.max_epochs=1", "trainer.limit_train_batches=2"),
    *("trainer.limit_val_batches=1", "loader.batch_size=8", "loader.num_workers=0"),
]
MLP = ["experiment=resnet18", "model=mlp"]
WITH = {
    "lbfgs": [*MLP, "optimizer=lbfgs", "lr_scheduler=constant"],
    "sharded": MLP,
    "turns": ["experiment=gan", "model.width=4"],
}
# LBFGS computes gradients by itself, where these cannot reach them; a Sequential is no MLP.
OUT_OF_REACH = {"clip_grad_norm", "clip_grad_value", "clip_grad_per_group", "gradient_noise"}
REFUSED = {
    "lbfgs": {*OUT_OF_REACH, "precision=fp16", "activation_checkpointing_segments"},
    "sharded": {"activation_checkpointing_segments"},
    "turns": {"activation_checkpointing_segments"},
}


def outcome(words, strategy):
    """Train two updates; return "trains", or the message with which it was refused."""
    try:
        config = parse(compose(words).config)
        trainer = build(config, strategy).trainer
        trainer.fit()
    except (ConfigError, RunError) as error:
        return str(error)
    assert trainer.state.global_step > 0
    return "trains"


def outcomes(kind, strategy):
    """Return the outcome with each key of `trainer`, and with each number format."""
    words = [*WITH[kind][:1], *SHORT, *WITH[kind][1:]]
    tried = {key: [f"trainer.{key}={value}"] for key, value in VALUES.items()}
    tried |= {f"precision={name}": [f"trainer.precision={name}"] for name in FORMATS}
    return {
        name: outcome([*words, *TOGETHER.get(name, []), *more], strategy)
        for name, more in tried.items()
    }


def test_every_key_has_a_value_here():
    assert VALUES.keys() == {field.name for field in fields(TrainerConfig)} - {"seed"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lbfgs", "turns"])
def test_each_key_trains_or_is_refused_by_its_name(kind):
    check(kind, outcomes(kind, Strategy("cpu")))


@pytest.mark.slow
def test_each_key_trains_sharded_or_is_refused_by_its_name(ranks):
    found = ranks(1, toys.in_group(partial(outcomes, "sharded"), kind=FSDP), patience=200)
    check("sharded", found[0])


def check(kind, found):
    refused = {name: text for name, text in found.items() if text != "trains"}
    assert refused.keys() == REFUSED[kind]
    for name, text in refused.items():
        needed = [word.partition("=")[0] for word in TOGETHER.get(name, [])]
        assert any(key in text for key in (name.partition("=")[0], *needed))
