"""An update calls no more of torch's operators than a loop by hand, but for what protects it.

Counted on a CPU; on a GPU most operators are a kernel.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.options import Clipping, TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH = 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


class Counting(TorchDispatchMode):
    """Count the operators that compute: no views, no numbers read on the host, no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not func.is_view and not name.startswith(("detach", "_local_scalar", "_record")):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    return nn.Sequential(*parts)


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, pieces: int
) -> Callable[[tuple[Tensor, Tensor]], None]:
    """Return an update with clipping, and means of loss, accuracy and norm, as host numbers."""
    sums = [0.0, 0.0, 0.0]
    parameters = list(model.parameters())

    def update(batch: tuple[Tensor, Tensor]) -> None:
        for images, labels in zip(*(part.chunk(pieces) for part in batch), strict=True):
            with torch.autocast("cpu") if precision == "bf16" else nullcontext():
                outputs = model(images)
                loss = cross_entropy(outputs, labels)
            (loss / pieces if pieces > 1 else loss).backward()
            sums[0] += loss.item() * len(labels)
            sums[1] += (outputs.argmax(1) == labels).sum().item()
        sums[2] += nn.utils.clip_grad_norm_(parameters, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()

    return update


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_update_calls_few_more_operators_than_by_hand(
    name: str, precision: str, pieces: int
) -> None:
    torch.manual_seed(1)
    batches = [(5 * torch.randn(BATCH, 1, 8, 8), torch.randint(3, (BATCH,))) for _ in range(3)]
    model, other = network(), network()
    trainer = Trainer(
        model,
        Classification(3),
        OPTIMIZERS[name](model.parameters()),
        batches,
        precision=precision,
        callbacks={},
        options=TrainerOptions(gradient_accumulation_steps=pieces, clipping=Clipping(norm=1.0)),
    )
    optimizer = OPTIMIZERS[name](other.parameters())
    update = by_hand(other, optimizer, precision, pieces)
    for batch, micro_batches in zip(batches, trainer.draw(0), strict=True):
        with Counting() as ours:
            trainer.update(micro_batches)
        with Counting() as reference:
            update(batch)
    more, fewer = ours.calls - reference.calls, reference.calls - ours.calls
    copies, labels = more.pop("cat", 0) + more.pop("clone", 0), more.pop("min", 0)
    assert copies == 1  # of BatchNorm's statistics
    assert labels <= pieces  # whether one is not to be counted
    assert more.total() <= fewer.total(), f"{more} for {fewer}"
    assert reference.calls.total() > 30
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
