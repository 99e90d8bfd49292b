"""Mistakes in a user's own model, task or callback: one line says where, with what, what to do."""

import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import toys
from regimen.conf.python_words import in_python
from regimen.trainer.callback import Callback
from regimen.trainer.errors import (
    RunError,
    UserCodeError,
    describe_user_error,
    describe_value,
    is_user_code,
)
from regimen.trainer.task import StepOutput, Task
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer


class Net(nn.Module):
    def __init__(self, detach=False, features=8, classes=3):
        super().__init__()
        self.detach = detach
        self.head = nn.Linear(features, classes)

    def forward(self, x):
        out = self.head(x)
        return out.detach() if self.detach else out


class Two(Net):
    def forward(self, x, mask):
        return self.head(x)


class Mine(Task):
    def __init__(self, result=lambda loss: loss):
        self.result = result

    def training_step(self, model, batch):
        inputs, labels = batch
        return self.result(cross_entropy(model(inputs), labels))


class Shout(Callback):
    def on_update_end(self, trainer):
        raise KeyError("nothing")


def trainer_of(model, task, callbacks=None, labels=3):
    data = DataLoader(TensorDataset(torch.randn(8, 8), torch.arange(8) % labels), batch_size=4)
    more = {"callbacks": callbacks, "max_epochs": 1}
    return toys.trainer_of(task, data, model=model, val=data, **more)


def in_a_dict(loss):
    return {"loss": loss}


def detached(loss):
    return StepOutput(loss.detach())


def odd_sums(loss):
    return StepOutput(loss, sums={"accuracy": 0.9})


CASES = [
    (in_a_dict, {}, ["Mine.training_step", "{loss: float64 []}"]),
    (lambda loss: None, {}, ["training_step returned None", "return"]),
    (lambda loss: StepOutput(loss.item()), {}, ["whose loss is", ".item()"]),
    (lambda loss: StepOutput({"a": loss, "b": 2.0}), {}, ["loss 'b' is 2.0"]),
    (detached, {}, ["no gradient", ".detach()"]),
    (None, {"detach": True}, ["no gradient", "Net.forward"]),
    (odd_sums, {}, ["sums['accuracy'] is 0.9", "tensor"]),
    (None, {"features": 5}, ["Net.forward", "x=float64 [4, 8]", "head, Linear(", "in_features=8"]),
    (
        None,
        {"classes": 2},
        ["Mine.training_step", "batch=(float64 [4, 8], int64 [4])", "Target 2", "label 2"],
    ),
]


@pytest.mark.parametrize(("result", "model", "texts"), CASES, ids=range(len(CASES)))
def test_a_mistake_says_which_function_what_it_had_and_what_to_change(result, model, texts):
    trainer = trainer_of(Net(**model), Mine(result) if result else Mine())
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever torch raises)
        trainer.fit()

    error = caught.value
    said = str(error) if isinstance(error, UserCodeError) else describe_user_error(error)
    assert [text for text in texts if text not in said] == []
    assert "\n" not in said
    # A notebook shows it below the traceback.
    assert isinstance(error, UserCodeError) or in_python(said) in error.__notes__


def dry_run(trainer):
    """Compute the first update without applying it."""
    micro_batches = next(trainer.draw(0))
    trainer.updater.dry_run_backward(micro_batches)


def test_a_dry_runs_update_finds_them_and_changes_nothing():
    model = Net().double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for result in (in_a_dict, detached, odd_sums):
        trainer = trainer_of(model, Mine(result))
        with pytest.raises(UserCodeError):
            dry_run(trainer)

    dry_run(trainer_of(model, Mine()))

    for name, now in model.state_dict().items():
        assert torch.equal(before[name], now)


def test_a_tensor_is_a_loss():
    trainer = trainer_of(Net().double(), Mine())
    trainer.fit()
    assert trainer.state.global_step == 2
    assert trainer.metrics["val/loss"] > 0


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
TOLD = r"\[4, 2\].*Net.forward was given float64 \[4, 8\]"
LAYER = r"1, Linear\(.*was given float64 \[4, 8\].*in_features=8"


@pytest.mark.parametrize(
    ("model", "labels", "told"),
    [
        pytest.param(Net(classes=2), 3, TOLD, id="outputs"),
        pytest.param(Net(), 8, r"labels from 0 to \d, but num_classes=3.*data set", id="labels"),
        pytest.param(Two(), 3, r"mask.*parameters agree with the call", id="parameters"),
        pytest.param(FLAT, 3, LAYER, id="layer"),
    ],
)
def test_model_and_data_that_do_not_fit_are_named(model, labels, told):
    with pytest.raises(RunError, match=told):
        trainer_of(model, Classification(3), labels=labels).fit()


def test_a_callbacks_mistake_is_its_own():
    with pytest.raises(KeyError) as caught:
        trainer_of(Net(), Mine(), {"shout": Shout()}).fit()
    assert "Shout.on_update_end" in describe_user_error(caught.value)


def test_what_is_no_code_of_the_users_is_not_blamed_on_it():
    files = [torch.__file__, importlib.util.__file__, sys.modules[Trainer.__module__].__file__]
    assert [is_user_code(file) for file in [*files, __file__]] == [False, False, False, True]


def test_shapes_are_spelled_briefly():
    batch = {
        "image": torch.zeros(2, 3),
        "more": [torch.zeros(2)] * 9,
        "n": 3,
        "text": "long" * 99,
    }
    more = "(float32 [2], float32 [2], float32 [2], float32 [2], ...)"
    assert describe_value(batch) == f"{{image: float32 [2, 3], more: {more}, n: 3, text: str}}"
