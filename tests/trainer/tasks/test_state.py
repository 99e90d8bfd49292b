"""A task's state between batches: started anew, kept from evaluations, saved and resumed."""

import copy
import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from regimen.trainer.callback import Callback
from regimen.trainer.components.components import build_components
from regimen.trainer.errors import DivergedError, ModelError, UserCodeError
from regimen.trainer.evaluation import evaluation_mode
from regimen.trainer.options import TrainerOptions
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer
from toys import assert_equal, in_group, loader

ROWS = 4
LENGTH = 3
SIZE = 5
LSTMState = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    """An LSTM that is given the state that it has left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, 6, batch_first=True)
        self.head = nn.Linear(6, SIZE)

    def forward(self, x: Tensor, state: LSTMState | None) -> tuple[Tensor, LSTMState]:
        out, state = self.lstm(x, state)
        return self.head(out), state


class Truncated(Task):
    """Truncated backpropagation through time."""

    persistent = ("state",)

    def __init__(self) -> None:
        self.state: LSTMState | None = None
        self.begun: list[Any] = []

    def on_epoch_start(self, epoch: int) -> None:
        self.state = None
        self.begun.append(epoch)

    def on_evaluation_start(self, stage: str) -> None:
        self.state = None
        self.begun.append(stage)

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs, state = model(inputs, self.state)
        self.state = (state[0].detach(), state[1].detach())
        return mse_loss(outputs, targets)

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        outputs, self.state = model(batch[0], self.state)
        return outputs


def batches(count: int = 5, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(ROWS, LENGTH, SIZE, generator=generator, dtype=torch.float64)

    return [(draw(), draw()) for _ in range(count)]


def make(task: Task, data: Any = None, val: Any = None, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = Recurrent().double()
    options = TrainerOptions(
        max_epochs=arguments.pop("epochs", 2),
        log_every_n_steps=1,
        validate_every_n_steps=2 if val else None,
        **arguments.pop("options", {}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(
        model, task, optimizer, data or batches(), val, options=options, verbose=False, **arguments
    )


def by_hand(epochs: int = 2) -> Recurrent:
    torch.manual_seed(0)
    model = Recurrent().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        state = None
        for inputs, targets in batches():
            outputs, (h, c) = model(inputs, state)
            state = (h.detach(), c.detach())
            mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_state_starts_anew_each_epoch_and_evaluations_leave_it_alone() -> None:
    """Validations in mid-epoch, of another number of rows, and predictions change no bit."""
    other_rows = [(x[:2], y[:2]) for x, y in batches(3, seed=1)]

    class Predicting(Callback):
        def on_update_end(self, trainer: Trainer) -> None:
            trainer.predict(other_rows)

    task = Truncated()
    trainer = make(task, val=other_rows, callbacks=[Predicting()])
    trainer.fit()

    assert_equal(trainer.model, by_hand(), 0)
    assert [name for name in task.begun if name != "predict"][:5] == [0, *3 * ["val"], 1]
    assert "predict" in task.begun


def test_an_evaluation_begins_with_the_state_that_its_start_sets() -> None:
    task = Truncated()
    trainer = make(task)
    first = trainer.evaluate(batches(2, seed=1))
    trainer.fit()
    state = task.state
    again = make(copy.deepcopy(task))
    again.model.load_state_dict(trainer.model.state_dict())
    second = again.evaluate(batches(2, seed=1))

    assert second == trainer.evaluate(batches(2, seed=1)) != first
    assert state is not None
    assert task.state is not None
    assert torch.equal(state[0], task.state[0])


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_resume_within_an_epoch_is_exact(steps: int) -> None:
    class Keeping(Callback):
        def on_boundary(self, trainer: Trainer) -> None:
            if trainer.state.updates == steps:
                self.kept = copy.deepcopy(trainer.state_dict())

    keeping = Keeping()
    whole = make(Truncated(), callbacks=[keeping])
    whole.fit()
    task = Truncated()
    resumed = make(task)
    resumed.load_state_dict(keeping.kept)
    resumed.fit()

    assert_equal(resumed.model, whole.model, 0)
    assert task.begun[0] == 1  # epoch 0 goes on, and is not started again


def test_a_resume_from_a_file_is_exact(tmp_path: Path) -> None:
    class Stopping(Callback):
        def on_update_end(self, trainer: Trainer) -> None:
            if trainer.state.updates == 3:
                trainer.state.request_stop("test")

    make(Truncated(), callbacks=[Stopping()], run_dir=tmp_path / "run").fit()
    resumed = make(Truncated(), run_dir=tmp_path / "run")
    resumed.fit(resume="auto")

    assert_equal(resumed.model, by_hand(), 0)


class ByRow(Truncated):
    """Keep the state of each row of the data, wherever the row is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_start(0)

    def on_epoch_start(self, epoch: int) -> None:
        self.state = (torch.zeros(1, ROWS, 6), torch.zeros(1, ROWS, 6))
        self.to(torch.device("cpu"), torch.float64)

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, rows = batch
        assert self.state is not None
        h, c = self.state
        outputs, (new_h, new_c) = model(inputs, (h[:, rows], c[:, rows]))
        h[:, rows] = new_h.detach()
        c[:, rows] = new_c.detach()
        return mse_loss(outputs, targets)


def train_by_rows(strategy: Any, steps: int) -> nn.Module:
    samples = [(x[row], y[row], row) for x, y in batches() for row in range(ROWS)]
    model = make(ByRow()).model
    if strategy is not None:
        model = strategy.prepare(model)
    trainer = Trainer(
        model,
        ByRow(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loader(samples, steps, batch=ROWS, shuffled=False, strategy=strategy),
        strategy=strategy,
        options=TrainerOptions(max_epochs=2),
        verbose=False,
    )
    trainer.fit()
    return trainer.model


def test_state_by_rows_is_the_same_by_any_number_of_micro_batches_and_processes(ranks: Any) -> None:
    wanted = by_hand()
    for steps in (1, 2, 4):
        assert_equal(train_by_rows(None, steps), wanted)
    for model in ranks(2, in_group(partial(train_by_rows, steps=2))):
        assert_equal(model, wanted)


class Bank(Task):
    """Write into a memory bank in place: a tensor, or a buffer of a module."""

    persistent = ("bank", "place")

    def __init__(self) -> None:
        self.bank = torch.zeros(6, SIZE, dtype=torch.float64)
        self.place = 0
        self.module = nn.Module()
        self.module.register_buffer("bank", torch.zeros(6, SIZE, dtype=torch.float64))

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        outputs, _ = model(batch[0], None)
        row = outputs.detach().mean((0, 1))
        bank = self.module.bank
        assert isinstance(bank, Tensor)
        loss = mse_loss(outputs, batch[1]) + (outputs.mean((0, 1)) @ (self.bank + bank).T).sum()
        self.bank[self.place] = row
        bank[self.place] = row
        self.place = (self.place + 1) % len(self.bank)
        return loss


def test_a_bank_that_is_written_in_place_is_kept_from_evaluations() -> None:
    plain = make(Bank())
    plain.fit()
    validated = make(Bank(), val=batches(3, seed=1))
    validated.fit()

    assert_equal(plain.model, validated.model, 0)
    assert isinstance(plain.task, Bank)
    assert isinstance(validated.task, Bank)
    assert torch.equal(plain.task.bank, validated.task.bank)
    assert plain.task.place == validated.task.place == 10 % 6


def test_an_update_that_is_skipped_leaves_no_trace_in_the_state() -> None:
    data = batches(4)
    data[1][0][0, 0, 0] = float("nan")
    task = Truncated()
    trainer = make(task, data, epochs=1, options={"on_nonfinite": "skip"})
    trainer.fit()
    without = make(Truncated(), [data[0], *data[2:]], epochs=1)
    without.fit()

    assert trainer.state.skipped_updates == 1
    assert_equal(trainer.model, without.model, 0)

    stopped = Truncated()
    with pytest.raises(DivergedError):
        make(stopped, data, epochs=1).fit()
    assert stopped.state is not None
    assert stopped.state[0].isfinite().all()


def test_an_error_in_an_evaluation_puts_the_state_back() -> None:
    task = Bank()
    parts = build_components(Recurrent().double(), task)
    with suppress(RuntimeError), evaluation_mode(parts):
        task.bank += 1
        task.place = 5
        raise RuntimeError

    assert not task.bank.any()
    assert task.place == 0


def test_state_that_is_not_declared_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    task = Truncated()
    task.persistent = ()
    trainer = make(task)
    trainer.fit()
    with caplog.at_level(logging.WARNING):
        trainer.state_dict()
        trainer.fit(max_epochs=3)
        trainer.state_dict()
        trainer.fit(max_epochs=4)
        trainer.state_dict()

    assert caplog.text.count("task.state changes in training") == 1
    assert 'persistent = ("state",)' in caplog.text


@pytest.mark.parametrize(
    ("persistent", "message"),
    [
        pytest.param("state", r'is a text: .* \("state",\)', id="text"),
        pytest.param(("stat",), r"names 'stat', and the task has no such attribute", id="unknown"),
    ],
)
def test_a_wrong_name_is_refused_before_the_run(persistent: Any, message: str) -> None:
    task = Truncated()
    task.persistent = persistent
    with pytest.raises(ModelError, match=message):
        make(task)


@pytest.mark.parametrize(
    "value", [{1, 2}, SimpleNamespace(), [object()]], ids=["set", "object", "within"]
)
def test_what_a_checkpoint_cannot_hold_is_refused(value: Any) -> None:
    task = Truncated()
    task.state = value
    with pytest.raises(UserCodeError, match=r"persistent names 'state', which is .*tensors"):
        make(task).state_dict()


def test_a_search_cannot_advance_the_state_several_times() -> None:
    model = Recurrent().double()
    with pytest.raises(ModelError, match=r"LBFGS computes the loss of a batch several times"):
        Trainer(model, Truncated(), torch.optim.LBFGS(model.parameters()), batches())


class WithTensors(Truncated):
    """Tensors of all kinds as attributes."""

    shared: ClassVar[Tensor] = torch.zeros(1)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(3)
        self.pairs = {"a": (torch.ones(2), [torch.arange(2)]), "b": "text"}


def tensors_in(task: WithTensors) -> Iterator[Tensor]:
    yield task.weight
    yield task.pairs["a"][0]  # type: ignore[misc]
    yield task.pairs["a"][1][0]  # type: ignore[misc]


def test_tensors_that_are_attributes_go_where_the_batches_go() -> None:
    task = WithTensors()
    build_components(Recurrent(), task, strategy=Strategy("meta"), precision="fp64")
    assert [tensor.device.type for tensor in tensors_in(task)] == ["meta"] * 3

    dtypes = [tensor.dtype for tensor in tensors_in(task)]
    assert dtypes == [torch.float64, torch.float64, torch.int64]
    assert task.pairs["b"] == "text"


def test_a_parameter_outside_of_a_module_is_refused() -> None:
    task = Truncated()
    task.scale = nn.Parameter(torch.zeros(()))  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"\.scale is a parameter outside of a module"):
        make(task)
