"""Mistakes in a user's own model, task or callback: one line says where, with what, what to do."""

import importlib.util
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer.errors import RunError, UserCodeError, account, is_users, spelled
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

MODULE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.callback import Callback
from trainer.task import StepOutput, Task


class Net(nn.Module):
    def __init__(self, kind="", features=8, classes=3):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(features, classes)

    def forward(self, x):
        out = self.head(x)
        return out.detach() if self.kind == "detach" else out


class Two(Net):
    def forward(self, x, mask):
        return self.head(x)


class Mine(Task):
    def __init__(self, kind=""):
        self.kind = kind

    def training_step(self, model, batch):
        inputs, labels = batch
        loss = cross_entropy(model(inputs), labels)
        if self.kind == "three":
            inputs, labels, weights = batch
        return {
            "": lambda: loss,
            "three": lambda: loss,
            "dict": lambda: {"loss": loss},
            "none": lambda: None,
            "number": lambda: StepOutput(loss.item()),
            "term": lambda: StepOutput({"a": loss, "b": 2.0}),
            "detached": lambda: StepOutput(loss.detach()),
            "sums": lambda: StepOutput(loss, sums={"accuracy": 0.9}),
        }[self.kind]()


class Stepless(Task):
    pass


class Shout(Callback):
    def on_update_end(self, trainer):
        raise KeyError("nothing")
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own_mistakes.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("own_mistakes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["own_mistakes"] = module
    yield module
    del sys.modules["own_mistakes"]


def trainer_of(model, task, callbacks=None, labels=3):
    data = TensorDataset(torch.randn(8, 8), torch.arange(8) % labels)
    return Trainer(
        model,
        task,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=4),
        DataLoader(data, batch_size=4),
        callbacks=callbacks,
        options=TrainerOptions(max_epochs=1),
    )


def test_a_tensor_is_a_loss(mine):
    trainer = trainer_of(mine.Net(), mine.Mine())
    trainer.fit()
    assert trainer.state.global_step == 2
    assert trainer.metrics["val/loss"] > 0


CASES = [
    pytest.param({"kind": "dict"}, {}, ["Mine.training_step", "{loss: float32 []}"], id="dict"),
    pytest.param({"kind": "none"}, {}, ["training_step returned None", "return"], id="nothing"),
    pytest.param({"kind": "number"}, {}, ["whose loss is", ".item()"], id="number"),
    pytest.param({"kind": "term"}, {}, ["loss 'b' is 2.0"], id="term"),
    pytest.param({"kind": "detached"}, {}, ["no gradient", ".detach()"], id="detached-loss"),
    pytest.param({}, {"kind": "detach"}, ["no gradient", "Net.forward"], id="detached-output"),
    pytest.param({"kind": "sums"}, {}, ["sums['accuracy'] is 0.9", "tensor"], id="sums"),
    pytest.param(
        {"kind": "three"},
        {},
        ["Mine.training_step", "batch=(float32 [4, 8], int64 [4])", "expected 3, got 2"],
        id="batch",
    ),
    pytest.param(
        {},
        {"features": 5},
        ["Net.forward", "x=float32 [4, 8]", "head, Linear(", "in_features=8"],
        id="layer",
    ),
    pytest.param({}, {"classes": 2}, ["Mine.training_step", "Target 2", "label 2"], id="label"),
]


@pytest.mark.parametrize(("task", "model", "texts"), CASES)
def test_a_mistake_says_which_function_what_it_had_and_what_to_change(mine, task, model, texts):
    trainer = trainer_of(mine.Net(**model), mine.Mine(**task))
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever torch raises)
        trainer.fit()
    error = caught.value
    said = str(error) if isinstance(error, UserCodeError) else account(error)
    assert [text for text in texts if text not in said] == []
    assert "\n" not in said
    # A notebook shows it below the traceback.
    assert isinstance(error, UserCodeError) or said in error.__notes__


def test_a_dry_runs_update_finds_them_and_changes_nothing(mine):
    model = mine.Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for kind in ("dict", "detached", "sums"):
        trainer = trainer_of(model, mine.Mine(kind))
        with pytest.raises(UserCodeError):
            trainer.updater.try_out(next(trainer.draw(0)))
    trainer_of(model, mine.Mine()).updater.try_out(next(trainer.draw(0)))
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


SEQUENTIAL = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("make", "labels", "told"),
    [
        pytest.param(
            lambda mine: mine.Net(classes=2),
            3,
            r"\[4, 2\].*Net.forward was given float32 \[4, 8\]",
            id="outputs",
        ),
        pytest.param(
            lambda mine: mine.Net(),
            8,
            r"labels from 0 to \d, but data.num_classes=3.*data set",
            id="labels",
        ),
        pytest.param(
            lambda mine: mine.Two(), 3, r"mask.*parameters agree with the call", id="parameters"
        ),
        pytest.param(
            lambda _: SEQUENTIAL,
            3,
            r"1, Linear\(.*was given float32 \[4, 8\].*in_features=8",
            id="layer",
        ),
    ],
)
def test_model_and_data_that_do_not_fit_are_named(mine, make, labels, told):
    with pytest.raises(RunError, match=told):
        trainer_of(make(mine), Classification(3), labels=labels).fit()


def test_a_task_without_a_step_says_so(mine):
    with pytest.raises(UserCodeError, match="Stepless defines no training_step"):
        trainer_of(mine.Net(), mine.Stepless()).fit()


def test_a_callbacks_mistake_is_its_own(mine):
    with pytest.raises(KeyError) as caught:
        trainer_of(mine.Net(), mine.Mine(), {"shout": mine.Shout()}).fit()
    assert "Shout.on_update_end" in account(caught.value)


def test_what_is_no_code_of_the_users_is_not_blamed_on_it():
    assert not is_users(torch.__file__)
    assert not is_users(importlib.util.__file__)
    assert not is_users(sys.modules[Trainer.__module__].__file__)
    assert is_users(__file__)


def test_shapes_are_spelled_briefly():
    batch = {"image": torch.zeros(2, 3), "more": [torch.zeros(2)] * 9, "n": 3, "text": "long" * 99}
    spelt = (
        "{image: float32 [2, 3], more: (float32 [2], float32 [2], float32 [2], float32 [2], ...)"
    )
    assert spelled(batch) == spelt + ", n: 3, text: str}"
