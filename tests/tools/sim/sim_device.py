"""The simulated accelerator as torch sees it: `torch.sim`, its collectives, and what it counts."""

import contextlib
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, cast

import regimen_sim as native  # type: ignore[import-not-found]
import torch
from torch import distributed
from torch._C._distributed_c10d import Backend, Work
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

Stream = torch.Stream
Event = torch.Event
default_generators = tuple(native.default_generator(i) for i in range(native.device_count()))
_initialized = True
device_count = native.device_count
_is_in_bad_fork = native.in_bad_fork
set_memory_limit = native.set_memory_limit
races = native.races
synchronize = torch.accelerator.synchronize
current_device = torch.accelerator.current_device_index
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
set_device = torch.accelerator.set_device_index
empty_cache = torch.accelerator.empty_cache
memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_allocated = torch.accelerator.max_memory_allocated
max_memory_reserved = torch.accelerator.max_memory_reserved
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info


class device(torch.accelerator.device_index):  # noqa: N801  (as torch.cuda names it)
    def __init__(self, of: int | str | torch.device) -> None:
        super().__init__(_index(of))


def is_available() -> bool:
    return True


is_initialized = is_bf16_supported = is_available


def get_device_name(index: int | None = None) -> str:
    return "simulated accelerator"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def stream(chosen: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return chosen or contextlib.nullcontext()


def _index(of: int | str | torch.device) -> int:
    where = torch.device("sim", of) if isinstance(of, int) else torch.device(of)
    return current_device() if where.index is None else where.index


def get_rng_state(device: int | str | torch.device = "sim") -> torch.Tensor:
    state: torch.Tensor = default_generators[_index(device)].get_state()
    return state


def set_rng_state(state: torch.Tensor, device: int | str | torch.device = "sim") -> None:
    default_generators[_index(device)].set_state(state)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


@contextlib.contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count what makes the host wait, by the innermost line outside torch: "file:line name"."""
    found: Counter[str] = Counter()

    def note(name: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/torch/" not in f.filename][-2:-1]
        found[f"{ours[0].filename}:{ours[0].lineno} {name}" if ours else name] += 1

    native.on_wait(note)
    try:
        yield found
    finally:
        native.on_wait(None)


class _Work(Work):
    """A collective on a stream of its own: whoever needs its result has `wait` ordered after it."""

    def __init__(self, result: Any, done: torch.Event, device: torch.device) -> None:
        super().__init__()
        self.done = done
        self.future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        self.future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.done.wait(current_stream())
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class Collectives(Backend):
    """Gloo's collectives over the memory of simulated devices, each on the stream of the group."""

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        self.streams: dict[torch.device, torch.Stream] = {}

    def getBackendName(self) -> str:  # noqa: N802
        return "simccl"

    def _run(self, name: str, result: Any, *arguments: Any) -> _Work:
        where = next(t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)).device
        if where.type == "cpu":  # an object's bytes
            return cast("_Work", getattr(self.gloo, name)(*arguments))
        stream = self.streams.setdefault(where, torch.Stream(device=where))
        stream.wait_stream(current_stream(where))
        with stream:
            hosts = [
                tree_map_only(torch.Tensor, partial(native.host, writes=i == 0), argument)
                for i, argument in enumerate(arguments)
            ]
            getattr(self.gloo, name)(*hosts).wait()
            return _Work(result, stream.record_event(), where)

    def allreduce(self, tensors: Any, options: Any) -> _Work:
        return self._run("allreduce", tensors, tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> _Work:
        return self._run("broadcast", tensors, tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> _Work:
        return self._run("allgather", outputs, outputs, inputs, options)

    def all_gather_single(self, output: Any, given: Any, options: Any) -> _Work:
        return self._run("_allgather_base", [output], output, given, options)

    def reduce_scatter_single(self, output: Any, given: Any, options: Any) -> _Work:
        return self._run("_reduce_scatter_base", [output], output, given, options)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any) -> _Work:
        pairs = zip(outputs, inputs, strict=True)
        return [self.all_gather_single(output, given, options) for output, given in pairs][-1]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any) -> _Work:
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(output, given, options) for output, given in pairs][-1]

    def gather(self, outputs: Any, inputs: Any, options: Any) -> _Work:
        return self._run("gather", outputs, outputs, inputs, options)

    def barrier(self, options: Any) -> Any:
        return self.gloo.barrier(options)  # type: ignore[attr-defined]

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def load() -> None:
    """Register the device with torch: `import torch` calls this by its entry point."""
    rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    generate_methods_for_privateuse1_backend(for_storage=True)
    if "collectives" not in os.environ.get("SIM_LACKS", "").split(","):
        distributed.Backend.register_backend("simccl", Collectives, devices=["sim"])
