"""The interface of strategies, and training in one process, on a single device or several GPUs.

`Strategy` does nothing but move the model to its device, so that neither the loop nor a callback
has to ask where a run computes. `trainer/strategies/ddp.py` uses several processes. Communication
belongs to the `group`.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regimen.conf.errors import Problem, raise_problems, truncated_list
from regimen.data.batch import map_tensors
from regimen.trainer.device import (
    backend_of,
    default_device,
    device_count,
    device_types,
    module_to_device,
    select,
    supports_collectives,
    with_index,
)
from regimen.trainer.distributed import Group
from regimen.trainer.errors import ModelError, ResourceError

NULL_CONTEXT = nullcontext()  # made once: an update of a small network enters several
# Unshared memory in bytes, on Linux, of a process that has imported torch and built a small model.
_PROCESS = 300 * 2**20
# What a style of tensor parallelism splits: of a Linear and of an Embedding. `_rep`: its input or
# output is whole on every process.
STYLES = {
    **dict.fromkeys(("colwise", "colwise_rep"), ("out_features", "embedding_dim")),
    **dict.fromkeys(("rowwise", "rowwise_rep"), ("in_features", "num_embeddings")),
}
# What transformers calls them.
_ALSO = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "rowwise",
}
PLAN = "strategy.tensor_parallel.plan"
_KIND = "cuda"  # what nn.DataParallel scatters to and gathers from, whose kernels are CUDA's


def count_devices(devices: int | Sequence[int] | str, accelerator: str) -> int:
    """Return the number of devices of this machine that `strategy.devices` selects."""
    if isinstance(devices, str):
        return max(1, device_count(accelerator))
    return devices if isinstance(devices, int) else len(devices)


def check_backend(accelerator: str, backend: str | None) -> None:
    """Raise ModelError for a backend that cannot connect the devices; None is their own."""
    if not device_count(accelerator):
        return
    device = default_device()
    if backend is None:
        if accelerator != "auto" and not supports_collectives(device):
            message = f"torch.distributed has no backend for {device.type}"
            raise ModelError("strategy.accelerator", message, "cpu trains on the CPU")
    elif supports_collectives(device) and not supports_collectives(device, backend):
        message = f"{backend} does not connect devices of the kind {device.type}"
        hint = f"auto takes {backend_of(device)}; strategy.accelerator=cpu trains on the CPU"
        raise ModelError("strategy.backend", message, hint)


def check_processes(processes: int, accelerator: str = "auto", backend: str = "auto") -> None:
    """Raise ResourceError if the machine lacks the memory or the devices for these processes."""
    there = device_count(accelerator)
    check_backend(accelerator, None if backend == "auto" else backend)
    if backend != "auto" and not there and not supports_collectives(torch.device("cpu"), backend):
        raise ResourceError(
            f"strategy.backend={backend} connects accelerators, and this run has none: set "
            "strategy.backend=gloo, or auto"
        )
    if backend != "auto" and not dist.is_backend_available(backend):
        raise ResourceError(
            f"strategy.backend={backend} is no part of this build of torch: install one that has "
            "it, or set strategy.backend=auto"
        )
    if 0 < there < processes:
        raise ResourceError(
            f"strategy.devices={processes}: this machine has {there} of {device_types()[0]}; "
            "strategy.accelerator=cpu trains on the CPU"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if processes > max(8, memory // _PROCESS):
        raise ResourceError(
            f"strategy.devices={processes}: the processes need at least "
            f"{processes * _PROCESS / 2**30:.0f} GiB, and this machine has {memory / 2**30:.0f} GiB"
        )


def workers_of(asked: int | Literal["auto"]) -> int:
    """Return the workers of one loader; auto: a process's share of the cores, at most 8."""
    if asked != "auto":
        return asked
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(share, 8) if share > 1 else 0  # one core computes: it gains nothing


def instances(model: nn.Module, classes: Sequence[str], key: str) -> list[nn.Module]:
    """Return the modules of some classes, outer ones first. Raises ModelError if one has none."""
    device_types = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in device_types:
            message = f"the model has no module of class {name}"
            raise ModelError(key, message, f"there are {', '.join(sorted(device_types))}")
    return [module for module in model.modules() if type(module).__name__ in classes]


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
            key = "tensor_parallel.size" if shard_size is None else "shard_size"
            parts = ["shards"] if shard_size is None else ["replicas", f"{shard_size} shards"]
            parts += [f"{tensor} tensor"] * (tensor > 1)
            message = f"{processes} processes cannot be laid out as {' x '.join(parts)}"
            hint = f"their number (strategy.devices, or torchrun's) must be a multiple of {size}"
            raise ModelError(f"strategy.{key}", message, hint)
        shards = shard_size or processes // tensor
        return cls(processes // (shards * tensor), shards, tensor)

    def sizes(self) -> dict[str, int]:
        """Return the dimensions that the grid has, in order."""
        return {name: size for name, size in asdict(self).items() if size > 1 or name == "shards"}

    def __str__(self) -> str:
        sizes = " x ".join(f"{size} {name}" for name, size in self.sizes().items())
        return f"{self.replicas * self.shards * self.tensor} processes = {sizes}"


def tensor_styles(
    model: nn.Module, plan: Mapping[str, str] | Literal["auto"], size: int
) -> dict[str, str]:
    """Return the modules that a plan splits over `size` processes, each with its style.

    `plan`: a style by pattern of names, or the model's own. Raises ModelError for what torch cannot
    split, and for a pattern of which there is none.
    """
    plan = _own_plan(model) if isinstance(plan, str) else plan
    device_types = (nn.Linear, nn.Embedding)
    there = {name: m for name, m in model.named_modules() if isinstance(m, device_types)}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    styles = dict[str, str]()
    problems = []
    for pattern, given in plan.items():
        style = _ALSO.get(given, given)
        names = [name for name in there if fnmatchcase(name, pattern)]
        if style not in STYLES:
            message = f"{pattern}: there is no style {given!r} here"
            problems.append(Problem(PLAN, message, f"there are {', '.join(STYLES)}"))
        elif not names:
            known = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in there))
            message = f"{pattern}: the model has no Linear or Embedding of such a name"
            problems.append(Problem(PLAN, message, f"there are {truncated_list(known) or 'none'}"))
        else:
            styles |= dict.fromkeys(names, style)
    widths = {n: STYLES[s][isinstance(there[n], nn.Embedding)] for n, s in styles.items()}
    if uneven := [n for n, width in widths.items() if getattr(there[n], width) % size]:
        named = ", ".join(dict.fromkeys(widths[n] for n in uneven))
        message = f"{truncated_list(uneven)}: {named} cannot be split evenly over {size} processes"
        problems.append(Problem(PLAN, message, "leave it out, or choose another size"))
    if tied := [n for n in styles if any(uses[id(p)] > 1 for p in there[n].parameters())]:
        message = (
            f"{truncated_list(tied)}: its weight is another module's, too, and would no longer be"
        )
        problems.append(Problem(PLAN, message, "leave it out"))
    raise_problems(problems, ModelError)
    return styles


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Return a model's own plan, as those of transformers have, for what it consists of."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for name, module in model.named_modules():
        if own := getattr(module, "tp_plan", None):
            root = f"{name}." if name else ""
            every = {root + pattern: style for pattern, style in own.items()}
            return {p: style for p, style in every.items() if any(fnmatchcase(n, p) for n in names)}
    hint = "give styles by patterns of names, such as {blocks.*.mlp.up: colwise}"
    raise ModelError(PLAN, "auto: the model has no plan of its own", hint)


class Strategy:
    """Train in one process on one device."""

    name = "single"
    devices = 1
    mesh = Mesh()
    evaluates_wrapped = True  # whether evaluation calls the wrapped module, too
    updates_on_host = False  # whether parameters are in host memory while a GPU computes
    some_unused = False  # whether an update may leave parameters without a gradient
    evaluates_in_step = False  # whether a process must call the model whenever the others do
    gradient_scale = 1.0  # the divisor of gradients in their exchange: a loss is multiplied by it
    shares_buffers = True  # whether all processes compute with the main process's buffers
    sharded_checkpoint = False  # whether each process writes its part of a checkpoint

    def __init__(
        self, device: torch.device | str | None = None, group: Group | None = None
    ) -> None:
        self.device = default_device() if device is None else with_index(device)
        self.computing = [self.device]  # the devices of this process
        self.group = group or Group()
        # The context of the run's forward passes.
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def setup(self) -> None:
        """Select the device and join the process group; `group.leave` is the counterpart."""
        select(self.device)
        self.group.join(self.device)

    @property
    def data_parallel_size(self) -> int:
        """The number of parts that the samples of an update are split into, for devices."""
        return self.devices // self.mesh.tensor

    def explain(self) -> str | None:
        """Return in what the devices differ from the configuration; None if they do not."""
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

        `counts=False`: the process has no sample in it and computes with a borrowed one.
        """
        return NULL_CONTEXT

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of an evaluation, in which all processes have the saved buffers."""
        return NULL_CONTEXT

    def warm_up(self, wrapped: nn.Module, compute: Callable[[], None]) -> None:
        """Before a resume, call `compute` (gradients that are dropped) if the wrapper needs it."""

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load an unsharded state into `model`."""
        model.load_state_dict(state)

    def gather_tensors(self, tree: Any, only_main: bool = False) -> Any:
        """Return `tree` with unsharded tensors; `only_main`: values on the main process suffice."""
        return tree

    def split_like(self, tree: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Return `tree`, a state by parameter name, with tensors sharded as the parameters are."""
        return tree


class DataParallel(Strategy):
    """Train in one process on several GPUs; the loss is taken over the gathered outputs.

    The loss is therefore exact for shards of uneven size, too. `device_ids`, `output_device` and
    `dim` are the arguments of nn.DataParallel; `devices`, a number or a list, is used without
    `device_ids`.
    """

    name = "dp"

    def __init__(
        self,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        devices: int | Sequence[int] | str = "auto",
        accelerator: str = "auto",
    ) -> None:
        on_gpus = accelerator in ("auto", _KIND)
        super().__init__(None if on_gpus else accelerator)
        self.device_ids = _numbers(device_ids, devices) if on_gpus else []
        self._output_device = output_device
        self._dim = dim
        self.devices = max(1, len(self.device_ids))
        if self.device_ids:
            self.computing = [torch.device(_KIND, number) for number in self.device_ids]
            self.device = self.computing[0]

    def explain(self) -> str | None:
        """Return what happens on a machine without two GPUs; None if there are two."""
        if len(self.device_ids) > 1:
            return None
        return (
            f"strategy=dp: there is no second GPU to split a batch with, so {self.device} trains "
            "alone, with the same result; strategy=ddp uses several processes, on CPUs as well"
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split each forward pass over the GPUs, if there are two or more."""
        if len(self.device_ids) < 2:
            return model
        inner = _InFormat(model, self.autocast)
        parallel = nn.DataParallel(inner, self.device_ids, self._output_device, self._dim)

        # To the device of the targets.
        parallel.register_forward_hook(
            lambda _, inputs, outputs: map_tensors(lambda t: t.to(self.device), outputs)
        )
        return parallel


class _InFormat(nn.Module):
    """Compute in the run's format. Autocast is a state of each thread, and torch passes to the
    threads of replicas whether it is enabled, but not its dtype."""

    def __init__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self._autocast():
            return self.model(*inputs, **named)


def _numbers(device_ids: Sequence[int] | None, devices: int | Sequence[int] | str) -> list[int]:
    there = range(device_count(_KIND))
    chosen = devices if device_ids is None else device_ids
    if isinstance(chosen, int | str):
        return [*there[: chosen if isinstance(chosen, int) else None]]
    if missing := [number for number in chosen if number not in there]:
        raise ResourceError(
            f"strategy.device_ids={[*chosen]}: this machine has {len(there)} GPUs and no "
            f"{missing[0]}"
        )
    return [*chosen]
