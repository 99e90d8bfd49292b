"""The base of strategies with one process per device: its device, its group, its launch."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from regimen.conf.errors import Problem, collect_problems, did_you_mean
from regimen.trainer.device import (
    backend_of,
    default_device,
    device_count,
    device_types,
    supports_collectives,
)
from regimen.trainer.distributed import Group, is_rank
from regimen.trainer.errors import ModelError, ResourceError
from regimen.trainer.strategies.batchnorm import synchronize
from regimen.trainer.strategies.strategy import (
    NULL_CONTEXT,
    Devices,
    Mesh,
    Strategy,
    count_devices,
    first_device,
)

# Unshared memory in bytes, on Linux, of a process that has imported torch and built a small model.
_PROCESS_MEMORY = 300 * 2**20


class LaunchOptions(NamedTuple):
    """What the launcher needs to know of a strategy."""

    processes: int  # on this machine
    max_restarts: int


class MultiProcess(Strategy):
    """Train in several processes, each of which computes a part of every update's batch.

    devices: processes on this machine, or the numbers of their devices; under torchrun the world
    decides. backend: of torch.distributed; auto is the device's own. timeout: seconds after which a
    silent process has failed. max_restarts: how often the launcher starts the processes again.
    Raises ResourceError if the machine lacks the memory or the devices for its processes.
    """

    starts_processes = True
    shares_buffers = False

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        backend: str = "auto",
        timeout: float = 1800.0,
        max_restarts: int = 0,  # of the launcher, which reads it from the node
        sync_batchnorm: bool = False,
    ) -> None:
        check_processes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), accelerator, backend)
        device = _local_device(devices, accelerator, backend)
        group = Group(backend_of(device) if backend == "auto" else backend, timeout)
        super().__init__(device, group)
        self.devices = group.world_size
        self.gradient_scale = float(group.world_size)  # gradients are averaged over the processes
        self._sync_batchnorm = sync_batchnorm
        self._has_samples = True  # False: in this micro-batch the process borrows one

    @classmethod
    def launch_options(
        cls,
        *,
        devices: Devices = "auto",
        accelerator: str = "auto",
        backend: str = "auto",
        max_restarts: int = 0,
        **others: Any,
    ) -> LaunchOptions:
        """Return what the launcher starts. Raises ResourceError if this machine cannot run it."""
        processes = count_devices(devices, accelerator)
        check_processes(processes, accelerator, backend)
        return LaunchOptions(processes, max_restarts)

    @classmethod
    def stand_in(
        cls, *, devices: Devices = "auto", accelerator: str = "auto", **others: Any
    ) -> Strategy:
        """Return what plays this strategy's part where there is one process only.

        A dry run and an evaluation build on one device what each process would build on its own.
        """
        strategy = Strategy(first_device(devices, accelerator))
        strategy.name = cls.name
        strategy.starts_processes = True
        strategy.shards_parameters = cls.shards_parameters
        strategy.devices = count_devices(devices, accelerator)
        strategy.mesh = cls.mesh_of(strategy.devices, **others)
        return strategy

    @classmethod
    def mesh_of(cls, processes: int, **others: Any) -> Mesh:
        """Return the grid of a run's processes. Raises ModelError if they do not make one."""
        return Mesh()

    @classmethod
    def problems(
        cls,
        *,
        devices: Devices = "auto",
        accelerator: str = "auto",
        backend: str = "auto",
        max_restarts: int = 0,
        **others: Any,
    ) -> Iterable[Problem]:
        """Return whether device, grid and backend exist, and there are processes to start."""
        # Of the classes of Regimen the schema has looked at these.
        if (isinstance(devices, int) and devices < 1) or (
            isinstance(devices, str) and devices != "auto"
        ):
            expected = "expected a number >= 1, a list of numbers, or auto"
            return [Problem("strategy.devices", f"{expected}, got {devices!r}")]
        found: list[Problem] = []
        if not isinstance(max_restarts, int) or max_restarts < 0:
            found.append(
                Problem("strategy.max_restarts", f"expected an integer >= 0, got {max_restarts!r}")
            )
        with collect_problems(found):
            first_device(devices, accelerator)
            processes = count_devices(devices, accelerator)
            cls.mesh_of(int(os.environ["WORLD_SIZE"]) if is_rank() else processes, **others)
        # torch.distributed knows its own backends, and those that a vendor's package registers.
        if backend != "auto" and backend not in dist.Backend.backend_list:
            names = dist.Backend.backend_list[1:]  # the first is none
            listed = f"there are {', '.join(names)}; auto takes the device's own"
            message = f"no backend {backend!r} is registered"
            hint = did_you_mean(backend, names) or listed
            found.append(Problem("strategy.backend", message, hint))
        return found

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device; with `sync_batchnorm` replace its BatchNorm layers."""
        if self._sync_batchnorm and self.device.type == "cpu":
            # To make a group is a collective; without tensor parallelism there is none yet.
            group = self.group.data or dist.new_group(backend="gloo", timeout=self.group.timeout)
            synchronize(model, group, lambda: self._has_samples)
        elif self._sync_batchnorm:
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            model = convert(model, self.group.data)
        return super().prepare(model)

    @contextmanager
    def accumulate(self, wrapped: nn.Module, last: bool, counts: bool = True) -> Iterator[None]:
        """Exchange gradients in the last micro-batch of an update only."""
        self._has_samples = counts
        try:
            with self._exchanging(wrapped, last):
                yield
        finally:
            self._has_samples = True

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return the context in which `wrapped` exchanges gradients if `last`, else keeps them."""
        return NULL_CONTEXT

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate what is saved: the weights with the main process's buffers; a collective.

        A checkpoint holds the main process's buffers, such as BatchNorm's running statistics, of
        which each process has its own.
        """
        before = [(buffer, buffer.clone()) for buffer in model.buffers()]
        for buffer, _ in before:
            dist.broadcast(buffer, src=0)
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.copy_(value)


def _local_device(devices: Devices, accelerator: str, backend: str) -> torch.device:
    """Return the device of this process, the CPU where the backend serves no accelerator."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    available = device_count(accelerator)
    named_backend = None if backend == "auto" else backend
    if not available or not supports_collectives(default_device(), named_backend):
        return torch.device("cpu")
    number = local_rank if isinstance(devices, int | str) else devices[local_rank]
    if number >= available:
        raise ResourceError(
            f"strategy.devices: process {local_rank} of this machine needs "
            f"{device_types()[0]}:{number}, "
            f"but it has {available}; strategy.accelerator=cpu trains on the CPU"
        )
    return torch.device(device_types()[0], number)


def check_processes(processes: int, accelerator: str = "auto", backend: str = "auto") -> None:
    """Raise ResourceError if the machine lacks the memory or the devices for these processes.

    Raises ModelError for a backend that cannot connect the devices.
    """
    available = device_count(accelerator)
    if available:
        _check_backend(accelerator, backend)
    if backend != "auto":
        on_cpu = supports_collectives(torch.device("cpu"), backend)
        if not available and not on_cpu:
            raise ResourceError(
                f"strategy.backend={backend} connects accelerators, and this run has none: set "
                "strategy.backend=gloo, or auto"
            )
        if not dist.is_backend_available(backend):
            raise ResourceError(
                f"strategy.backend={backend} is no part of this build of torch: install one that "
                "has it, or set strategy.backend=auto"
            )
    if 0 < available < processes:
        raise ResourceError(
            f"strategy.devices={processes}: this machine has {available} of {device_types()[0]}; "
            "strategy.accelerator=cpu trains on the CPU"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if processes > max(8, memory // _PROCESS_MEMORY):
        raise ResourceError(
            f"strategy.devices={processes}: the processes need at least "
            f"{processes * _PROCESS_MEMORY / 2**30:.0f} GiB, and this machine has "
            f"{memory / 2**30:.0f} GiB"
        )


def _check_backend(accelerator: str, backend: str) -> None:
    """Raise ModelError for a backend that cannot connect this machine's accelerators."""
    device = default_device()
    has_own_backend = supports_collectives(device)
    if backend == "auto":
        if accelerator != "auto" and not has_own_backend:
            raise ModelError(
                "strategy.accelerator",
                f"torch.distributed has no backend for {device.type}",
                "cpu trains on the CPU",
            )
    elif has_own_backend and not supports_collectives(device, backend):
        raise ModelError(
            "strategy.backend",
            f"{backend} does not connect devices of the kind {device.type}",
            f"auto takes {backend_of(device)}; strategy.accelerator=cpu trains on the CPU",
        )
