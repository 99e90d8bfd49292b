"""From a configuration to its strategy and device."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from conf.errors import Problem
from conf.schema import Config
from conf.schema_strategy import StrategyConfig
from trainer.distributed.machine import check_processes
from trainer.distributed.processes import is_rank
from trainer.errors import ModelError
from trainer.strategies.ddp import DDP
from trainer.strategies.dp import DataParallel
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Planned, Strategy, count_devices

_DDP = (
    "comm_hook",
    "comm_hook_options",
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
)
_FSDP = (
    "wrap_modules",
    "mixed_precision",
    "reshard_after_forward",
    "sharded_checkpoint",
    "cpu_offload",
)


def build_strategy(config: Config) -> Strategy:
    """Build the strategy of a configuration."""
    options = config.strategy
    if options.name == "dp":
        if options.accelerator != "auto":
            _device(options)  # raises if there is no such accelerator
        return DataParallel(
            options.device_ids,
            options.output_device,
            options.dim,
            options.devices,
            options.accelerator,
        )
    if options.name in ("ddp", "fsdp") or is_rank():
        return _group(options)
    return Strategy(_device(options))


def _group(options: StrategyConfig) -> Strategy:
    """Build the strategy of several processes; under torchrun `single` becomes one of them."""
    if not is_rank():
        count = count_devices(options.devices, options.accelerator)
        on_cpu = options.accelerator == "auto" and not torch.cuda.is_available()
        return Planned(options.name, count, None if on_cpu else _device(options))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_processes(here, options.accelerator, options.backend)
    processes = Processes(
        None if options.backend == "auto" else options.backend,
        options.timeout,
        options.accelerator,
        options.devices if isinstance(options.devices, list) else None,
        options.sync_batchnorm,
    )
    names = _FSDP if options.name == "fsdp" else _DDP
    values: dict[str, Any] = {name: getattr(options, name) for name in names}
    if options.name != "fsdp":
        return DDP(processes, **values)
    # With DTensor and sympy, which take seconds to import.
    fsdp = importlib.import_module("trainer.strategies.fsdp")
    strategy: Strategy = fsdp.FSDP(processes, **values)
    return strategy


def _device(options: StrategyConfig) -> torch.device | None:
    first = options.devices[0] if isinstance(options.devices, list) else None
    if options.accelerator == "auto" and first is None:
        return None
    kind = options.accelerator if options.accelerator != "auto" else "cuda"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if not available[kind]:
        message = f"this machine has no {kind} device"
        raise ModelError(Problem("strategy.accelerator", message, "auto takes what it has"))
    return torch.device(kind, first) if first is not None and kind != "cpu" else torch.device(kind)
