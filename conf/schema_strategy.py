# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""The keys of `strategy`: which devices compute, and how they work together."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from conf.errors import Problem
from conf.fields import default_of, option, rule_of

_GROUP = ("ddp", "fsdp")


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    """One device, several under one process (dp), or one process each (ddp, fsdp)."""

    name: Literal["single", "dp", "ddp", "fsdp"] = option("single", "set by the group's choice")
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "kind of device")
    devices: int | list[int] | Literal["auto"] = option(
        "auto", "how many, or their numbers; under torchrun the world decides", at_least=1
    )
    backend: Literal["auto", "nccl", "gloo"] = option(
        "auto", "how processes talk: nccl on GPUs, gloo on CPUs", strategies=_GROUP
    )
    timeout: float = option(
        1800.0, "seconds after which a silent process has failed", above=0, strategies=_GROUP
    )
    max_restarts: int = option(
        0, "restarts from the last checkpoint when a process dies", at_least=0, strategies=_GROUP
    )
    device_ids: list[int] | None = option(None, "GPUs; null = all", strategies=("dp",))
    output_device: int | None = option(
        None, "GPU that gathers; null = the first", at_least=0, strategies=("dp",)
    )
    dim: int = option(0, "dimension along which a batch is split", strategies=("dp",))
    find_unused_parameters: bool | None = option(
        None,
        "for models that do not use every parameter each time; null = where the task (a GAN) or a "
        "callback (unfreeze) has it so",
        strategies=("ddp",),
    )
    static_graph: bool = option(False, "the same parameters each time", strategies=("ddp",))
    gradient_as_bucket_view: bool = option(
        True, "saves a copy of the gradients", strategies=("ddp",)
    )
    bucket_cap_mb: float | None = option(
        None, "size of what is exchanged at once; null = torch's", above=0, strategies=("ddp",)
    )
    broadcast_buffers: bool = option(
        True, "rank 0's buffers (BatchNorm's statistics) for all", strategies=("ddp",)
    )
    sync_batchnorm: bool = option(
        False, "BatchNorm's statistics over all processes", strategies=_GROUP
    )
    comm_hook: Literal["fp16_compress", "bf16_compress", "powersgd"] | None = option(
        None, "compress gradients on their way", strategies=("ddp",)
    )
    comm_hook_options: dict[str, Any] = option({}, "of powersgd's state", strategies=("ddp",))
    wrap_modules: list[str] | None = option(
        None, "classes of modules that are sharded as units; null = the whole", strategies=("fsdp",)
    )
    mixed_precision: Literal["bf16", "fp16"] | None = option(
        None,
        "format of sharded parameters in use; null = as trainer.precision",
        strategies=("fsdp",),
    )
    reshard_after_forward: bool = option(
        True, "free gathered parameters until backward", strategies=("fsdp",)
    )
    sharded_checkpoint: bool = option(
        False, "each process writes its own part of a checkpoint", strategies=("fsdp",)
    )
    cpu_offload: bool = option(False, "keep shards in host memory", strategies=("fsdp",))

    def conflicts(self) -> Iterator[Problem]:
        """Name what the chosen strategy would pass over in silence."""
        if isinstance(self.devices, list) and (not self.devices or min(self.devices) < 0):
            yield Problem("devices", "expected a list of device numbers")
        for name in ("devices", "device_ids"):
            numbers = getattr(self, name)
            if isinstance(numbers, list) and len(set(numbers)) < len(numbers):
                yield Problem(name, f"names a device twice: {numbers}")
        count = len(self.devices) if isinstance(self.devices, list) else self.devices
        if self.name == "single" and count not in (0, 1, "auto"):
            yield Problem(
                "devices", f"{count} devices need strategy=ddp, fsdp or dp: single has one"
            )
        if self.backend == "nccl" and self.accelerator in ("cpu", "mps"):
            yield Problem(
                "backend", f"nccl connects GPUs, but strategy.accelerator is {self.accelerator}"
            )
        for declared in fields(self):
            users = rule_of(declared).strategies
            changed = getattr(self, declared.name) != default_of(declared)
            if users and self.name not in users and changed:
                choices = " or ".join(f"strategy={user}" for user in users)
                message = f"has no effect with strategy={self.name}, only with {choices}"
                yield Problem(declared.name, message)
