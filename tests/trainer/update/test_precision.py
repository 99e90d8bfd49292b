"""Number formats: what is autocast, what is stored, and when a scaled loss overflows."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer.errors import DivergedError
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update.precision import Precision


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator)
    return TensorDataset(x, torch.randint(3, (40,), generator=generator))


def trained(precision, clip: float | None = None, **options) -> Trainer:
    model = network()
    trainer = Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        DataLoader(data(), batch_size=8),
        precision=precision,
        options=TrainerOptions(**{"max_epochs": 1, "clip_grad_norm": clip, **options}),
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(
    ("name", "autocast", "stored"),
    [
        pytest.param("fp32", None, torch.float32, id="fp32"),
        pytest.param("tf32", None, torch.float32, id="tf32"),
        pytest.param("bf16", torch.bfloat16, torch.float32, id="bf16"),
        pytest.param("fp16", torch.float16, torch.float32, id="fp16"),
        pytest.param("bf16_true", None, torch.bfloat16, id="bf16_true"),
        pytest.param("fp64", None, torch.float64, id="fp64"),
    ],
)
def test_each_format_is_the_loop_written_by_hand(name, autocast, stored, clip) -> None:
    model = network().to(stored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16")
    for x, y in DataLoader(data(), batch_size=8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = cross_entropy(model(x.to(stored)), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    ours = trained(name, clip).model
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert a.dtype == b.dtype == stored
        assert torch.equal(a, b)


def overflowing(**scaler) -> Precision:
    return Precision("fp16", "cpu", {"init_scale": 2.0**40, **scaler})


def test_an_overflow_moves_nothing_but_the_scale() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    precision = overflowing(backoff_factor=2.0**-10)
    loader = DataLoader(data(), batch_size=8)
    options = TrainerOptions(max_epochs=1, limit_train_batches=2)
    trainer = Trainer(
        model,
        Classification(3),
        optimizer,
        loader,
        None,
        schedule,
        precision=precision,
        options=options,
    )
    trainer.fit()
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert precision.scale == 2.0**20
    state = trainer.state
    assert (state.global_step, state.updates, state.skipped_updates) == (0, 2, 2)


def test_training_goes_on_once_the_scale_fits() -> None:
    trainer = trained(overflowing(backoff_factor=2.0**-30))
    assert trainer.state.skipped_updates == 1
    assert trainer.state.global_step == 4
    assert trainer.metrics["train/skipped_updates"] == 1
    assert trainer.metrics["train/loss_scale"] == 2.0**10


def test_a_scale_that_collapses_ends_the_run() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        Classification(3),
        optimizer,
        DataLoader(data(), batch_size=8),
        precision="fp16",
        options=TrainerOptions(max_epochs=10, max_skipped_in_a_row=12),
    )
    with pytest.raises(DivergedError, match=r"last 12 updates.*loss scale 16"):
        trainer.fit()


def test_gradients_of_single_elements_share_no_memory() -> None:
    # Their gradient is the 1 that a backward pass begins with, unless it is copied.
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    precision = Precision()
    for _ in range(2):
        precision.backward(first.sum() + second.sum())
    first.grad.mul_(5)
    precision.backward(second.sum())
    assert (first.grad.item(), second.grad.item()) == (10, 3)


def test_a_loss_that_has_no_gradient_is_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        Precision().backward(torch.ones(()))


def test_a_loss_of_a_class_of_its_own_is_asked_for_its_backward_pass() -> None:
    class Loss(torch.Tensor):
        called = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.called += func is torch.Tensor.backward
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = nn.Parameter(torch.ones(3))
    Precision().backward(parameter.sum().as_subclass(Loss))
    assert Loss.called == 1
    assert parameter.grad.tolist() == [1, 1, 1]
