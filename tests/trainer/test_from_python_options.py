"""What a person gives to a Trainer from Python is done or refused, in Python's words."""

import functools
import re
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.early_stopping import EarlyStopping
from regimen.conf.check import check
from regimen.conf.errors import ConfigError
from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.components.setup import set_switches
from regimen.trainer.errors import DivergedError, ModelError, SampleError
from regimen.trainer.options import GradientNoise, TrainerOptions
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.trainer import Trainer

INPUTS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :3].argmax(1)
DATA = TensorDataset(INPUTS, LABELS)


def trainer_of(task: Any = None, train: Any = None, model: Any = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    given = {
        "callbacks": {},
        "options": TrainerOptions(max_epochs=1),
        **more,
    }
    optimizer = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(DATA, 8) if train is None else train
    return Trainer(model, task or Classification(3), optimizer, train, **given)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"max_epochs": -1}, "max_epochs: expected a number >= 1, got -1"),
    "text": ({"max_epochs": "3"}, "max_epochs: expected an integer or None .* got '3'$"),
    "truth": ({"max_epochs": True}, "max_epochs: .* got True"),
    "fraction": ({"limit_train_batches": 2.5}, r"limit_train_batches: .* got 2\.5"),
    "word": ({"precision": "bf61"}, "precision: .*did you mean bf16"),
    "endless": ({"max_epochs": None}, "max_epochs: None, as are max_steps and max_time"),
    "nan": ({"clip_grad_norm": float("nan")}, "clip_grad_norm: expected a number > 0"),
    "seed": ({"seed": -1}, "seed: expected a number >= 0"),
    "noise": ({"gradient_noise": GradientNoise(eta=-1.0)}, r"gradient_noise\.eta: expected"),
    "compile": ({"compile": {"mode": "fast"}}, r"compile\.mode: expected one of default"),
    "globs": ({"activation_checkpointing": "0"}, "activation_checkpointing: expected a list"),
    "together": ({"clip_grad_per_group": True}, "clip_grad_per_group: has no effect"),
    "overfit": ({"overfit_batches": 2}, "overfit_batches: has no effect .*; give a train_loader"),
    "test": ({"limit_test_batches": 2}, "limit_test_batches: has no effect"),
    "memory": ({"memory_limit": 2.0}, "memory_limit: has no effect"),
    "auto": ({"gradient_accumulation_steps": "auto"}, "gradient_accumulation_steps: has no effect"),
}


@pytest.mark.parametrize(
    ("given", "told"), [pytest.param(*case, id=name) for name, case in WRONG.items()]
)
def test_an_option_that_cannot_be_is_refused_where_it_is_written(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^TrainerOptions\.{told}") as caught:
        TrainerOptions(**given)
    assert isinstance(caught.value, ValueError)
    assert "null" not in str(caught.value)


def test_all_wrong_options_are_told_at_once_and_the_defaults_are_sound() -> None:
    with pytest.raises(
        ValueError, match=r"2 mistakes in the options:(\n.*max_epochs.*|\n.*seed.*)+"
    ):
        TrainerOptions(max_epochs=0, seed=-1)
    assert check({}, TrainerConfig) == []
    assert TrainerOptions().max_epochs == TrainerConfig().max_epochs

    noise: Any = {"eta": 0.5}
    assert TrainerOptions(gradient_noise=noise).gradient_noise == GradientNoise(eta=0.5)
    assert TrainerOptions(on_nonfinite="skip", error_if_nonfinite=True).on_nonfinite == "stop"


def test_the_model_is_compiled_and_recomputed_as_the_options_say() -> None:
    plain = trainer_of()
    plain.fit()
    again = trainer_of(
        options=TrainerOptions(
            max_epochs=1,
            compile={"backend": "eager"},
            activation_checkpointing=["0"],
            channels_last=True,
        )
    )

    assert type(again.components.compiled_model).__name__ == "OptimizedModule"
    assert [name for name, part in again.model.named_children() if "forward" in vars(part)] == ["0"]

    again.fit()
    for one, other in zip(plain.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)

    regions = TrainerOptions(compile={"backend": "eager", "regions": ["Linear"]})
    assert trainer_of(options=regions).model[0]._compiled_call_impl is not None
    with pytest.raises(
        ModelError, match=r"TrainerOptions\(activation_checkpointing=\.\.\.\): 'no'"
    ):
        trainer_of(options=TrainerOptions(activation_checkpointing=["no"]))


@pytest.mark.parametrize("name", ["cudnn_benchmark", "tf32", "detect_anomaly", "deterministic"])
def test_a_switch_of_torchs_is_set_where_it_is_asked_for(name: str) -> None:
    read = {
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "detect_anomaly": torch.is_anomaly_enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled,
    }[name]
    set_switches(TrainerConfig())
    trainer_of()

    assert read() is False

    try:
        options: dict[str, Any] = {name: True}
        trainer_of(options=TrainerOptions(**options))
        assert read() is True
    finally:
        torch.autograd.set_detect_anomaly(False)
        set_switches(TrainerConfig())


def test_no_batch_of_validation_and_a_fraction_of_an_unknown_length() -> None:
    trainer = trainer_of(
        val_loader=DataLoader(DATA, 8), options=TrainerOptions(limit_val_batches=0)
    )
    assert trainer.val_loaders == {}

    endless: Any = {1: [INPUTS, LABELS]}.values().__iter__

    class Unsized:
        def __iter__(self) -> Any:
            return endless()

    trainer = trainer_of(train=Unsized(), options=TrainerOptions(limit_train_batches=0.5))

    with pytest.raises(ValueError, match=r"limit_train_batches=\.\.\.\): 0.5 is a fraction"):
        trainer.fit()


def test_a_monitor_that_nothing_logs_is_refused_before_training() -> None:
    val = DataLoader(DATA, 8)
    for callback in (
        EarlyStopping(monitor="val/acuracy", patience=1),
        Checkpoint(monitor="val/acuracy"),
    ):
        trainer = trainer_of(val_loader=val, callbacks={"own": callback})
        told = r"callbacks\['own'\]\.monitor: val/acuracy: no such metric; .* mean val/accuracy"
        with pytest.raises(ConfigError, match=told):
            trainer.fit()
        assert trainer.state.updates == 0
    for monitor in ("val/accuracy", "train/loss", "auto", None):
        kept = {"own": EarlyStopping(monitor=monitor)}
        trainer_of(val_loader=val, callbacks=kept).fit()
    several = {"val/clean": val}
    stopping = EarlyStopping(monitor="val/clean/loss", patience=1, mode="min")
    trainer_of(val_loader=several, callbacks={"own": stopping}).fit()


class Pairs:
    """A data set of one's own."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], int(LABELS[index])


MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "function": ({"task": functional.cross_entropy}, "task is the function cross_entropy, .*task"),
    "partial": (
        {"task": functools.partial(functional.cross_entropy, reduction="sum")},
        "task is the function cross_entropy",
    ),
    "lambda": ({"task": lambda output, target: output.mean()}, "task is the function <lambda>"),
    "module": ({"task": nn.CrossEntropyLoss()}, "task is a CrossEntropyLoss"),
    "class": ({"task": Classification}, "task is the class Classification"),
    "word": ({"task": "classification"}, "task is str"),
    "optimizer": ({"optimizer": torch.optim.SGD}, "optimizer is the class SGD"),
    "data_set": ({"train": DATA}, r"train_loader is a data set \(TensorDataset\) .*DataLoader\("),
    "own_data_set": ({"train": Pairs()}, r"train_loader is a data set \(Pairs\)"),
    "samples": ({"train": [*DATA]}, r"train_loader is a data set \(list\)"),
    "tensors": ({"train": (INPUTS, LABELS)}, r"train_loader is a data set \(tuple\)"),
    "validation": ({"val_loader": DATA}, "val_loader is a data set"),
    "several": ({"val_loader": {"val/a": DATA}}, "val_loader is a data set"),
}


@pytest.mark.parametrize(
    ("given", "told"), [pytest.param(*case, id=name) for name, case in MISPLACED.items()]
)
def test_what_stands_in_anothers_place_is_told_in_one_line(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(TypeError, match=told) as caught:
        trainer_of(**given)
    assert "\n" not in str(caught.value)
    assert "give " in str(caught.value)
    assert len(traceback.extract_tb(caught.tb)) <= 6


@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, functools.partial(functional.cross_entropy, reduction="sum")]
)
def test_a_function_is_a_loss_of_a_task(loss: Any) -> None:
    trainer_of(Classification(3, loss=loss)).fit()


@pytest.mark.parametrize("outputs", [1, 2])
def test_ordinary_pairs_of_a_regression_work(outputs: int) -> None:
    data = DataLoader(TensorDataset(INPUTS, INPUTS[:, :outputs]), 8)
    trainer_of(Regression(), data, nn.Linear(8, outputs)).fit()


def spoilt(row: int) -> torch.Tensor:
    inputs = INPUTS.clone()
    inputs[row, 2] = torch.nan
    return inputs


@pytest.mark.parametrize(
    ("train", "steps", "told"),
    [
        pytest.param(DataLoader(TensorDataset(spoilt(19), LABELS), 8), 1, "sample 19", id="loader"),
        pytest.param(
            DataLoader(TensorDataset(spoilt(13), LABELS), 8, shuffle=True),
            3,
            "sample 13",
            id="split",
        ),
        pytest.param([(spoilt(7), LABELS)], 1, "row 7 of the batch", id="list"),
        pytest.param([(spoilt(19), LABELS)], 4, "row 19 of the batch", id="split_list"),
    ],
)
def test_a_sample_is_named_where_it_is_known(train: Any, steps: int, told: str) -> None:
    options = TrainerOptions(max_epochs=1, gradient_accumulation_steps=steps)
    with pytest.raises(DivergedError, match=f"^{told} holds NaN") as caught:
        trainer_of(train=train, options=options).fit()
    assert 'TrainerOptions(on_nonfinite="skip")' in str(caught.value)
    assert not re.search(r"\b(trainer|optimizer|loader)\.", str(caught.value))


def test_an_evaluation_advises_nothing_that_is_not_there() -> None:
    narrow = DataLoader(TensorDataset(INPUTS[:, :4], LABELS), 8)
    for run in (
        lambda: trainer_of(val_loader=narrow).fit(),
        lambda: trainer_of().evaluate(narrow, "test"),
    ):
        with pytest.raises((SampleError, ModelError)) as caught:
            run()
        assert "transforms." not in str(caught.value)
        assert caught.value.__cause__ is None
