"""How often the host waits for a GPU within an update (I6), counted without one.

Fake tensors say that they are on `cuda:0`: every operation is called with them, nothing is
computed, and whatever would bring a number to the host goes through `Watch`.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import toys
from callbacks.ema import EMA
from data.batch import MicroBatch, Piece
from toys import ON_DEVICE
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update.precision import Precision

CUDA = torch.device("cuda", 0)
BATCH = 4
NORMALIZED = ("optimizer=muon", "+optimizer.optimizers.muon.normalized=true")
NODES = {**toys.optimizer_nodes(), "muon_normalized": toys.section("optimizer", *NORMALIZED)}
NODES.pop("lbfgs")  # which searches
DECIDED = {*ON_DEVICE, "muon_normalized"}
# What a number's way to the host is called, whatever the number is for.
READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")
# What starts no kernel.
FREE = ("view", "detach", "narrow", "alias", "reshape", "device", "_local_scalar_dense")


class Watch(TorchDispatchMode):
    """Count operations and reads; a number that is read is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.calls[name] += 1
        if name.startswith(("_fused_", "_amp_foreach_")):
            return None  # one kernel that writes in place; it has no fake of itself
        on_gpu = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_cuda]
        if name in READS and on_gpu:
            self.reads.append(name)
            return 0.0 if name == "_local_scalar_dense" else func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        target = args[0] if name == "copy_" else result
        if name in ("copy_", "_to_copy", "to") and on_gpu and target.device.type == "cpu":
            self.reads.append(name)
        return result


def network(layers: int = 3) -> nn.Module:
    inner = [
        part
        for _ in range(layers)
        for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    ]
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


class GivenGradients(Precision):
    """Give gradients: the engine's backward pass wants a real GPU, and reads nothing of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("fp32", "cuda")
        self._model = model

    def backward(self, loss: Tensor) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.ones_like(parameter)


@contextmanager
def updating(name: str, layers: int = 3, **options: Any) -> Iterator[tuple[Trainer, Any]]:
    """Give a trainer on fake CUDA after two updates, when all state is there, and an update."""
    with FakeTensorMode():
        with CUDA:
            model = network(layers)
        optimizers = build_optimizers(model, copy.deepcopy(NODES[name]), prefer_fused=True)
        batch = (torch.empty(BATCH, 1, 8, 8, device=CUDA), torch.zeros(BATCH, device=CUDA).long())
        trainer = Trainer(
            model,
            Classification(3),
            optimizers,
            [batch],
            strategy=Strategy(CUDA),
            precision=GivenGradients(model),
            callbacks={"ema": EMA(0.9)},
            options=TrainerOptions(clip_grad_norm=1.0, **options),
        )
        ema = trainer.callbacks["ema"]
        ema.on_fit_start(trainer)

        def update() -> None:
            trainer.update(
                [MicroBatch(batch, Piece(tuple(range(BATCH)), BATCH, 0, BATCH, 0, 1, 0, 0))]
            )
            ema.on_update_end(trainer)

        with Watch():
            update()
            update()
        yield trainer, update


@pytest.mark.parametrize("name", list(NODES))
@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_an_update_waits_once_or_not_at_all(name: str, choice: str) -> None:
    with updating(name, on_nonfinite=choice) as (trainer, update), Watch() as watch:
        for _ in range(3):
            update()
    by_device = name in DECIDED and choice == "stop"
    waits = 0 if by_device else 1
    if name == "adafactor":  # torch's own step asks for two norms of each parameter
        waits += 2 * len(list(trainer.model.parameters()))
    assert watch.reads == ["_local_scalar_dense"] * 3 * waits
    assert trainer.updater.guard.by_device == by_device


def test_a_read_of_the_device_is_counted() -> None:
    with FakeTensorMode(), Watch() as watch:
        number = torch.ones((), device=CUDA)
        number.item()
        number.cpu()
        torch.zeros(()).copy_(number)
    assert watch.reads == ["_local_scalar_dense", "_to_copy", "copy_"]


@pytest.mark.parametrize(("choice", "most"), [("stop", 9), ("skip", 2)])
def test_the_guard_and_the_sums_do_not_grow_with_the_model(choice: str, most: int) -> None:
    """What an update calls beside forward, backward and step: the same for any number of layers."""
    counts = []
    for layers in (3, 9):
        with updating("sgd", layers, on_nonfinite=choice) as (trainer, _):
            norm = torch.ones((), device=CUDA)
            with Watch() as watch:
                trainer.updater.guard.remember()
                trainer.updater.guard.refuses(norm)
        counts.append(sum(n for name, n in watch.calls.items() if name not in FREE))
    assert counts[0] == counts[1] <= most
