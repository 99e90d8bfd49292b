"""The toys of all tests: samples, a network, their loader, the loop by hand, what is logged."""

import copy
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential, Shuffled
from regimen.data.samplers import UpdateSampler
from regimen.scripts.composition.compose import compose
from regimen.trainer.callback import Callback
from regimen.trainer.distributed import Group
from regimen.trainer.options import TrainerOptions
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import Task
from regimen.trainer.trainer import Trainer

FEATURES = 5
CLASSES = 3
SAMPLES = 23
BATCH = 8  # the last update of an epoch has 7 samples

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Samples:
    """Inputs and targets in memory, as a user would write a data set."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def points(
    samples: int = SAMPLES,
    features: int = FEATURES,
    classes: int = CLASSES,
    dtype: torch.dtype = torch.float64,
) -> Samples:
    """Return random points, each with its class."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, features, generator=generator, dtype=dtype)
    return Samples(x, torch.randint(classes, (samples,), generator=generator))


def batches(count: int, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 8 points of 4 numbers with 3 classes; one may hold a NaN."""
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]
    if bad is not None:
        made[bad][0][3, 1] = float("nan")
    return made


def network(outputs: int = CLASSES) -> nn.Module:
    """Return the same small network each time, in float64."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, outputs)).double()


def normed() -> nn.Module:
    """Return a network for `batches` with running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def loader(
    data: Any,
    steps: int = 1,
    batch: int = BATCH,
    shuffled: bool = True,
    strategy: Strategy | None = None,
) -> Loader:
    """Return a process's loader: updates of `batch` samples in `steps` micro-batches."""
    group = (strategy or Strategy("cpu")).group
    sampler = UpdateSampler(
        Shuffled(len(data), seed=1) if shuffled else Sequential(len(data)),
        batch_size=batch,
        gradient_accumulation_steps=steps,
        rank=group.data_rank,
        world_size=group.data_size,
    )
    return Loader(data, sampler, seed=1)


def whole_batches(data: Samples, epochs: int = 2, shuffled: bool = True) -> Iterator[Any]:
    """Yield the batches of `loader` by plain indexing."""
    for epoch in range(epochs):
        order = Shuffled(len(data), seed=1)(epoch) if shuffled else torch.arange(len(data))
        for start in range(0, len(data), BATCH):
            chosen = torch.as_tensor(order[start : min(start + BATCH, len(data))])
            yield data.x[chosen], data.y[chosen]


def by_hand(
    objective: Objective,
    data: Samples,
    model: nn.Module | None = None,
    lr: float = 0.1,
    momentum: float = 0.9,
    *,
    epochs: int = 2,
    shuffled: bool = True,
) -> nn.Module:
    """Train with a loop as anyone would write it, on whole batches."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for x, y in whole_batches(data, epochs, shuffled):
        optimizer.zero_grad()
        objective(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def of_output(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Make a loss of output and target an objective for `by_hand`."""
    return lambda model, x, y: loss(model(x), y)


def trainer_of(
    task: Task,
    data: Any,
    steps: int = 1,
    *,
    model: nn.Module | None = None,
    lr: float = 0.1,
    momentum: float = 0.9,
    make: Any = None,
    val: Any = None,
    scheduler: Any = None,
    shuffled: bool = True,
    strategy: Strategy | None = None,
    callbacks: Any = None,
    compiling: Any = None,
    run_dir: Any = None,
    precision: Any = "fp64",
    **options: Any,
) -> Trainer:
    """Return what trains as `by_hand` does; `data` is of samples, or anything that has batches.

    `make` makes another optimizer of parameters; `compiling`: options of torch.compile.
    """
    model = network() if model is None else model
    model = strategy.prepare(model) if strategy else model
    make = make or functools.partial(torch.optim.SGD, lr=lr, momentum=momentum)
    optimizer = make(model.parameters())
    compiled: Any = torch.compile(model, **compiling) if compiling else None
    own = isinstance(data, Samples)
    return Trainer(
        model,
        task,
        optimizer,
        loader(data, steps, shuffled=shuffled, strategy=strategy) if own else data,
        val,
        scheduler(optimizer) if scheduler else None,
        strategy=strategy,
        callbacks=callbacks,
        run_dir=run_dir,
        options=TrainerOptions(**{"max_epochs": 2, **options}),
        precision=precision,
        compiled=compiled,
    )


def assert_equal(a: nn.Module, b: nn.Module, tolerance: float = 1e-12) -> None:
    """Compare the parameters of two models."""
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=name)


def distance(a: nn.Module, b: nn.Module) -> float:
    """Return the largest difference of two models' parameters."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    """Return the configuration of a command line."""
    return compose(list(overrides)).config


def section(name: str, *overrides: str) -> Any:
    """Return a section of a command line's configuration, a new one each time."""
    return copy.deepcopy(composed(*overrides)[name])


def optimizer_nodes() -> dict[str, Any]:
    """Return the nodes of the shipped optimizers, and of some more, by name."""
    folder = Path(__file__).resolve().parents[2] / "conf" / "optimizer"
    names = {path.stem for path in folder.glob("*.yaml")} - {"gan", "several"}
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1}
    return {
        **{name: section("optimizer", f"optimizer={name}") for name in sorted(names)},
        "sgd_plain": sgd,
        "sgd_damped": {**sgd, "momentum": 0.9, "dampening": 0.5},
    }


# Those whose kernels leave a step out; Adagrad's does later than torch 2.11.
ON_DEVICE = {"adam", "adamw", "adamw_finetune", "muon", "sgd", "sgd_nesterov", "sgd_plain"}
ON_DEVICE |= {"convnext_t", "deit_s", "gpt2", "resnet50_v2", "vit_s16"}  # AdamW and SGD of recipes
if hasattr(torch.optim.Adagrad([torch.zeros(1)], fused=True), "_step_supports_amp_scaling"):
    ON_DEVICE.add("adagrad")


class Log(Callback):
    """Keep what is logged, by step."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def on_log(self, trainer: Trainer, scalars: Any) -> None:
        """Keep a line."""
        self.lines.append((trainer.state.global_step, dict(scalars)))

    def of(self, key: str) -> dict[int, float]:
        """Return one scalar's values by step."""
        return {step: line[key] for step, line in self.lines if key in line}


class StopAt(Callback):
    """Stop as a signal does, after some update."""

    def __init__(self, update: int | None) -> None:
        self.update = update

    def on_update_end(self, trainer: Trainer) -> None:
        """Ask for the stop."""
        if trainer.state.updates == self.update:
            trainer.state.request_stop("SIGTERM", 143)


class Block(nn.Module):
    """A unit for `wrap_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + torch.tanh(self.linear(x))


def blocks() -> nn.Sequential:
    """Return a model of 9 features and 3 classes."""
    return nn.Sequential(Block(), Block(), nn.Linear(9, 3))


def loaders(group: Group, accumulation: int = 2) -> tuple[Loader, Loader]:
    """Return a process's loaders: updates of 10 samples, the last of 3; 10 samples to validate."""
    place: dict[str, Any] = {"rank": group.data_rank, "world_size": group.data_size}
    order = Shuffled(SAMPLES, seed=1)
    data = points(features=9)
    train = UpdateSampler(order, batch_size=10, gradient_accumulation_steps=accumulation, **place)
    val = UpdateSampler(Sequential(10), batch_size=4 * group.data_size, **place)
    return Loader(data, train, seed=0), Loader(data, val, seed=0)


def in_group(
    function: Callable[[Any], Any],
    kind: Any = DDP,
    **options: Any,
) -> Callable[[int], Any]:
    """Return what a process of the fixture `ranks` runs: `function(strategy)` in a gloo group."""
    options = {"accelerator": "cpu", "backend": "gloo", "timeout": 60, **options}

    def run(rank: int) -> Any:
        strategy = kind(**options)
        strategy.setup()
        result = function(strategy)
        strategy.group.leave()
        return result

    return run


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a state holds, each value with its path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def differences(one: Any, other: Any) -> list[str]:
    """Name the leaves that differ; a tensor of zeros is as good as none: state not begun yet."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            known = (t.cpu().nan_to_num(7) for t in (a, b))
            return a.dtype == b.dtype and torch.equal(*known)
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return not (a if isinstance(a, Tensor) else b).any()
        return bool(a == b)

    ours = dict(leaves(one))
    theirs = dict(leaves(other))
    keys = sorted(ours.keys() | theirs.keys())
    return [k for k in keys if not same(ours.get(k), theirs.get(k)) and "time/" not in k]


def through_a_file(state: Any) -> Any:
    """Return a state as it is loaded from where it was saved."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
