"""The interface of strategies: what a run asks of its devices and processes.

`Strategy` moves the model to one device and leaves the rest out, so that neither the loop nor a
callback has to ask where a run computes. Each strategy of `conf/strategy/` is a subclass in a file
of this room. Collectives belong to its `group` (`trainer/distributed.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from regimen.conf.errors import Problem
from regimen.trainer.device import (
    default_device,
    device_count,
    device_types,
    module_to_device,
    select,
    with_index,
)
from regimen.trainer.distributed import Group
from regimen.trainer.errors import ModelError

NULL_CONTEXT = nullcontext()  # made once: an update of a small network enters several

Devices = int | Sequence[int] | str  # `strategy.devices`: how many, which ones, or auto


def count_devices(devices: Devices, accelerator: str) -> int:
    """Return the number of devices of this machine that `strategy.devices` selects."""
    if isinstance(devices, str):
        return max(1, device_count(accelerator))
    return devices if isinstance(devices, int) else len(devices)


def first_device(devices: Devices, accelerator: str) -> torch.device:
    """Return the first device that a strategy selects. Raises ModelError without such a kind."""
    kinds = device_types()
    kind = kinds[0] if accelerator == "auto" else accelerator
    if kind not in kinds:
        raise ModelError(
            "strategy.accelerator",
            f"this machine has no {kind}: it has {' and '.join(kinds)}",
            "auto takes what it has",
        )
    if kind == "cpu" or isinstance(devices, int | str):
        return with_index(kind)
    return torch.device(kind, devices[0])


def instances(model: nn.Module, classes: Sequence[str], key: str) -> list[nn.Module]:
    """Return the modules of some classes, outer ones first. Raises ModelError if one has none."""
    names = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in names:
            raise ModelError(
                key,
                f"the model has no module of class {name}",
                f"there are {', '.join(sorted(names))}",
            )
    return [module for module in model.modules() if type(module).__name__ in classes]


def sparse_layers(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the weights whose gradients are sparse, each with the name of its layer."""
    found = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if getattr(layer, "sparse", False) and isinstance(weight, nn.Parameter):
            found[weight] = name or "the model"
    return found


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes as a grid; neighbours along `tensor`, the last, compute on the same samples."""

    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, processes: int, shard_size: int | None = None, tensor: int = 1) -> Self:
        """Lay processes out, by default without replicas. Raises ModelError if they do not fit."""
        size = tensor * (shard_size or 1)
        if processes % size:
            key = "strategy.tensor_parallel.size"
            grid = "shards"
            if shard_size is not None:
                key = "strategy.shard_size"
                grid = f"replicas x {shard_size} shards"
            if tensor > 1:
                grid += f" x {tensor} tensor"
            raise ModelError(
                key,
                f"{processes} processes cannot be laid out as {grid}",
                f"their number (strategy.devices, or torchrun's) must be a multiple of {size}",
            )
        shards = shard_size or processes // tensor
        return cls(processes // (shards * tensor), shards, tensor)

    def sizes(self) -> dict[str, int]:
        """Return the dimensions that the grid has, in order."""
        return {name: size for name, size in asdict(self).items() if size > 1 or name == "shards"}

    def __str__(self) -> str:
        sizes = " x ".join(f"{size} {name}" for name, size in self.sizes().items())
        return f"{self.replicas * self.shards * self.tensor} processes = {sizes}"


class Strategy:
    """Train on one device of one process; the base class of all strategies.

    A strategy of your own is a subclass, `strategy._target_=mypackage.Mine`; the other keys of the
    section are its keyword arguments. One that starts processes derives from `MultiProcess`.

    Called in this order: `problems` and `check_model` while the configuration is checked, `setup`
    in each process, `prepare` before the optimizer is built, `check` and `wrap` after it, then
    `accumulate` for each micro-batch.
    """

    name = "single"  # in the plan and in messages

    # What others ask of a strategy, or of its class.
    affects_result = False  # True: another one is another training, and no resume may change it
    starts_processes = False  # whether `train` starts one process per device
    shards_parameters = False  # whether no process holds whole parameters
    shares_parameters = False  # whether all processes train the same memory (Hogwild)
    copies_model = False  # whether a forward pass computes on copies of the model's modules
    evaluates_wrapped = True  # whether evaluation calls the wrapped module
    evaluates_in_step = False  # whether a process must call the model whenever the others do
    updates_on_host = False  # whether parameters are in host memory while an accelerator computes
    shares_buffers = True  # whether all processes compute with the main process's buffers
    sharded_checkpoint = False  # whether each process writes its part of a checkpoint
    gradient_scale = 1.0  # what the exchange divides gradients by: a loss is multiplied by it

    devices = 1  # of all processes
    mesh = Mesh()
    # Set by the trainer: whether an update may leave parameters without a gradient.
    has_unused_parameters = False

    def __init__(
        self, device: torch.device | str | None = None, group: Group | None = None
    ) -> None:
        self.device = default_device() if device is None else with_index(device)
        self.local_devices = [self.device]  # the devices of this process
        self.group = group or Group()
        # The context of the run's forward passes; set by the trainer.
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def problems(cls, **arguments: Any) -> Iterable[Problem]:
        """Return what is wrong with the arguments of a run's node, before anything is built."""
        return ()

    @classmethod
    def check_model(cls, model: nn.Module, **arguments: Any) -> None:
        """Raise ModelError for a model that the strategy cannot train with these arguments."""

    def setup(self) -> None:
        """Select the device and join the process group; `group.leave` is the counterpart."""
        select(self.device)
        self.group.join(self.device)

    @property
    def data_parallel_size(self) -> int:
        """The number of parts that the samples of an update are split into, for devices."""
        return self.devices // self.mesh.tensor

    def explain(self) -> str | None:
        """Return how the devices differ from what was configured; None if they do not."""
        return None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that training calls; it shares its parameters with `model`."""
        return model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move `model` to the device, or shard it, before its optimizer is built."""
        return module_to_device(model, self.device)

    def check(self, others: Mapping[str, nn.Module]) -> None:
        """Raise ModelError for modules of the task that this strategy cannot train."""

    def accumulate(
        self, wrapped: nn.Module, last: bool, counts: bool = True
    ) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch; gradients are exchanged in the last of an update.

        `counts=False`: the process has none of the micro-batch's samples left. It computes with the
        update's first sample, at weight zero, so that it takes part in the exchange.

        Behind the last one each process decides by its gradients whether the update is left out. A
        strategy that does not make them equal raises DivergedError here for its own.
        """
        return NULL_CONTEXT

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of an evaluation, in which all processes have the saved buffers."""
        return NULL_CONTEXT

    def unsharded(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which each process has whole parameters, once all called it."""
        return NULL_CONTEXT

    def warm_up(self, wrapped: nn.Module, compute: Callable[[], None]) -> None:
        """Before a resume, call `compute` (gradients that are dropped) if the wrapper needs it."""

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load an unsharded state into `model`."""
        model.load_state_dict(state)

    def gather_tensors(self, tree: Any) -> Any:
        """Return `tree` with unsharded tensors, which have values on the main process."""
        return tree

    def split_like(self, tree: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Return `tree`, a state by parameter name, with tensors sharded as the parameters are."""
        return tree


@contextmanager
def taking_part(strategy: Strategy) -> Iterator[None]:
    """Take part in the work of a strategy's processes: an error of one ends all of them."""
    strategy.setup()
    try:
        with strategy.group.propagate_errors():
            yield
    finally:
        strategy.group.leave()
