"""An update launches no more kernels on a GPU than a loop by hand; counted without one (I6).

Fake tensors say that they are on `cuda:0`. Every operator that is called with them, and every node
of the graph that a backward pass would run, is worth the kernels that torch 2.15 launches for it:

| operator | kernels |
|---|---|
| views, `detach`, `empty` | 0 |
| `sum`, `count_nonzero` | 1, and 1 to convert the elements, which booleans need |
| `stack`, `cat` | 1 for 128 tensors of one dtype; of several dtypes 1 for each that is converted |
| `copy_` | 0 within a dtype, which is a copy of memory |
| number / tensor | 2: `reciprocal` and `mul` |
| `where` with a number | 2: one fills a tensor with the number |
| `_foreach_*` of two lists | 1 for 64 tensors; of one list 1 for 110 |
| fused steps, all others | 1 |
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.batch import MicroBatch, Piece, note_least
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import Clipping, TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update import turn
from trainer.update.guard import DeviceGuard
from trainer.update.precision import Precision

CUDA = torch.device("cuda", 0)
CLASSES, SIDE = 3, 8
Batch = tuple[Tensor, Tensor]
FREE = ("empty", "detach", "lift_fresh", "device")
OPTIMIZERS = {
    "sgd": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    "adamw": {"_target_": "torch.optim.AdamW", "lr": 0.1},
}
NODES = {"AccumulateGrad": 0, "AddBackward0": 0, "WhereBackward0": 2}


class Kernels(TorchDispatchMode):
    """Count the kernels of each operator on the fake GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        if name.startswith(("_fused_", "_amp_foreach_")):
            self.launched[name] += 1
            return None  # it writes in place; it has no fake of itself
        if name == "_local_scalar_dense":
            return 0.0  # a guard asks once, before its first copy
        result = func(*args, **(kwargs or {}))
        found = [*given, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))]
        if any(t.device.type == "cuda" for t in found) and not func.is_view:
            self.launched[name] += kernels_of(name, args, given, result)
        return result

    def backward(self, loss: Tensor) -> None:
        """Count what a backward pass from a loss launches, without its first gradient."""
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = node.name()
            views = ("View", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "TBackward")
            self.launched[name] += 0 if name.startswith(views) else NODES.get(name, 1)
            waiting += [parent for parent, _ in node.next_functions]


def kernels_of(name: str, args: Any, given: list[Tensor], result: Any) -> int:
    if name.startswith(FREE) or name.endswith(("_empty", "empty_like")):
        return 0
    if name in ("sum", "count_nonzero"):
        return 1 if given[0].dtype == result.dtype else 2
    if name in ("stack", "cat"):
        alike = len({t.dtype for t in given}) == 1
        return -(-len(given) // 128) if alike else sum(t.dtype != result.dtype for t in given)
    if name == "copy_":
        return int(given[0].dtype != given[1].dtype)
    if name.startswith("_foreach_"):
        lists = sum(isinstance(a, list | tuple) for a in args)
        return -(-len(args[0]) // (64 if lists > 1 else 110))
    return 1


def network(normalized: bool) -> nn.Module:
    def block(channels: int) -> list[nn.Module]:
        norms = [nn.BatchNorm2d(4)] if normalized else []
        return [nn.Conv2d(channels, 4, 3), *norms, nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(*block(1), *block(4), *head)


def give_gradients(model: nn.Module) -> None:
    """Stand in for the engine, which wants a real GPU."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)


class Graphs(Precision):
    """Go through the graph instead of running it."""

    def __init__(self, model: nn.Module, kernels: Callable[[], Kernels]) -> None:
        super().__init__("fp32", "cuda")
        self._model, self._kernels = model, kernels

    def backward(self, loss: Tensor) -> None:
        torch.rsub(loss.detach(), 1, alpha=0)
        self._kernels().backward(loss)
        give_gradients(self._model)


def batches(pieces: int, known: bool = True) -> Iterator[list[Batch]]:
    """Yield updates; `known`: their labels were in host memory before."""
    while True:
        images = [torch.empty(4, 1, SIDE, SIDE, device=CUDA) for _ in range(pieces)]
        labels = [torch.zeros(4, device=CUDA, dtype=torch.long) for _ in range(pieces)]
        for part in labels:
            if known:
                note_least(part, 0)
        yield list(zip(images, labels, strict=True))


def by_hand(name: str, normalized: bool, pieces: int) -> Counter[str]:
    """Count an update of the loop of `scripts/benchmarks/gpu_loops.py`, in as many pieces."""
    with CUDA:
        model = network(normalized)
    parameters = list(model.parameters())
    (optimizer,) = build_optimizers(
        model, copy.deepcopy(OPTIMIZERS[name]), prefer_fused=True
    ).optimizers.values()
    sums = torch.zeros(3, device=CUDA)
    means, norms = sums[:2], sums[2]
    for _, parts in zip(range(3), batches(pieces), strict=False):
        with Kernels() as kernels:
            for images, labels in parts:
                outputs = model(images)
                loss = cross_entropy(outputs, labels)
                share = loss / pieces if pieces > 1 else loss
                torch.ones_like(share)  # what `backward` begins with
                kernels.backward(share)
                give_gradients(model)
                hits = outputs.detach().argmax(1).eq(labels).sum()
                if pieces > 1:
                    means += torch.stack([loss.detach(), hits])
            norm = nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            if pieces > 1:
                norms += norm
            else:
                sums += torch.stack([loss.detach(), norm, hits])
    return kernels.launched


def ours(name: str, normalized: bool, pieces: int, known: bool = True) -> Counter[str]:
    """Count an update of the trainer's, with clipping and the same means."""
    with CUDA:
        model = network(normalized)
    optimizers = build_optimizers(model, copy.deepcopy(OPTIMIZERS[name]), prefer_fused=True)
    kernels = Kernels()
    trainer = Trainer(
        model,
        Classification(CLASSES),
        optimizers,
        [],
        strategy=Strategy(CUDA),
        precision=Graphs(model, lambda: kernels),
        callbacks={},
        options=TrainerOptions(clipping=Clipping(norm=1.0)),
    )
    for _, parts in zip(range(3), batches(pieces, known), strict=False):
        total = sum(len(labels) for _, labels in parts)
        update = [
            MicroBatch(part, Piece((), len(part[1]), 4 * i, total, i, pieces, 0, 0))
            for i, part in enumerate(parts)
        ]
        with (kernels := Kernels()):
            trainer.update(update)
    assert isinstance(trainer.updater._guard, DeviceGuard)
    return kernels.launched


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fake parameters pass for plain tensors, which they stand for."""
    monkeypatch.setattr(turn, "are_alike", lambda parameters: True)


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("normalized", [True, False], ids=["batchnorm", "plain"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_update_launches_no_more_kernels_than_by_hand(
    name: str, normalized: bool, pieces: int
) -> None:
    with FakeTensorMode():
        reference, found = by_hand(name, normalized, pieces), ours(name, normalized, pieces)
    assert reference.total() > 30
    # torch's AdamW takes back its count of steps by a kernel if it may be told to skip one.
    more = int(name == "adamw" and normalized and pieces == 1)
    assert found.total() <= reference.total() + more, f"{found - reference}, {reference - found}"


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_labels_that_the_host_never_saw_are_counted_by_a_few_more(name: str, pieces: int) -> None:
    with FakeTensorMode():
        seen, unseen = (ours(name, True, pieces, known=known) for known in (True, False))
    # Two count the labels of a micro-batch; three turn the counts into its part of the update.
    assert unseen.total() - seen.total() <= 2 * pieces + 3 * (pieces > 1)
