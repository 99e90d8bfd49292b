# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""The keys that the trainer takes as they are: of the loop (`trainer`) and of devices (`strategy`).

Neither imports torch: the dataclasses are built while a configuration is checked.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from regimen.conf.errors import Problem
from regimen.conf.fields import (
    count,
    count_or_fraction,
    declared,
    duration,
    natural,
    option,
    positive,
)

# The strategies of Regimen by their short names; each has a file in `conf/strategy/`.
STRATEGIES = {
    "single": "regimen.trainer.strategies.single.Single",
    "dp": "regimen.trainer.strategies.data_parallel.DataParallel",
    "ddp": "regimen.trainer.strategies.ddp.DDP",
    "fsdp": "regimen.trainer.strategies.fsdp.FSDP",
}
_harmless = partial(option, affects_result=False)
# Keys that have an effect with some strategies only. Most say where and how fast a run computes;
# those that change its numbers say so.
_BOTH = ("ddp", "fsdp")
_of_dp = partial(_harmless, strategies=("dp",))
_of_ddp = partial(_harmless, strategies=("ddp",))
_of_fsdp = partial(_harmless, strategies=("fsdp",))
_of_both = partial(_harmless, strategies=_BOTH)


@dataclass(kw_only=True, slots=True)
class GradientNoiseConfig:
    """Gaussian noise on gradients, of variance eta / (1 + step) ** gamma (Neelakantan 2015)."""

    eta: float = positive(0.01, "variance at the first step")
    gamma: float = natural(0.55, "how fast it decays")

    def std(self, update: int) -> float:
        """Return the standard deviation at an update, counted from 0."""
        return math.sqrt(self.eta / (1 + update) ** self.gamma)


@dataclass(kw_only=True, slots=True)
class CompileOptions:
    """Arguments of torch.compile: none of them names a program, a file or an address."""

    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = _harmless(None, "a set of options")
    dynamic: bool | None = _harmless(False, "one kernel for all shapes")
    fullgraph: bool = _harmless(False, "no breaks of the graph")
    regions: list[str] | None = _harmless(
        None, "classes, each of whose modules is compiled by itself"
    )
    backend: str = _harmless("inductor", "its registered name")
    # A text could be the program to compile with (`cpp.cxx`).
    options: dict[str, bool | int | float] | None = _harmless(
        None, "numbers, true and false by name"
    )

    def conflicts(self) -> Iterator[Problem]:
        """Name the options that ask other machines, or that a mode sets."""
        for name in self.options or ():
            if "remote" in name:  # what a remote cache answers is unpickled
                yield Problem(f"options.{name}", "is refused: it asks other machines")
        if self.mode is not None and self.options:
            yield Problem("options", "excludes mode: a mode is a set of options")


Limit = int | float | None
_limit = partial(natural, None, check=count_or_fraction)


def _is_set(value: object) -> bool:
    return value is not None


def _scales_loss(value: object) -> bool:
    return value == "fp16"


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The loop, as the trainer takes it. A step is an update, whatever it was accumulated from."""

    max_epochs: int | None = count(10, "passes over the training set")
    max_steps: int | None = count(None, "updates; whichever limit comes first ends")
    max_time: float | str | None = positive(
        None, "seconds, or 'h:m:s' in quotes", check=duration, affects_result=False
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16_true", "fp64"] = option(
        "fp32",
        "bf16 and fp16 are autocast; bf16_true and fp64 hold the weights in that format",
        idle_with_closure=_scales_loss,
    )
    gradient_accumulation_steps: int | Literal["auto"] = count(
        1,
        "parts of an update: less memory, the same result; auto = as many as memory needs",
        affects_result=False,
    )
    memory_limit: float | None = positive(
        None,
        "GiB that a process may take on a CPU, for gradient_accumulation_steps=auto",
        affects_result=False,
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "an update that is NaN or infinite: end the run (exit 5), or leave it out"
    )
    max_skipped_in_a_row: int = count(20, "updates left out one after the other end it")
    clip_grad_norm: float | None = positive(
        None, "bound on the norm of the gradients", idle_with_closure=_is_set
    )
    clip_grad_norm_type: float = positive(2.0, "p of that norm; .inf = largest", infinite=True)
    clip_grad_per_group: bool = option(False, "bound each parameter group by itself")
    clip_grad_value: float | None = positive(
        None, "bound on each gradient entry", idle_with_closure=_is_set
    )
    error_if_nonfinite: bool = option(False, "an infinite or NaN norm ends the run, even with skip")
    gradient_noise: GradientNoiseConfig | None = option(
        None, "noise added to gradients", idle_with_closure=_is_set
    )
    activation_checkpointing: list[str] | None = option(
        None,
        "globs over module names whose activations are recomputed: less memory, more time",
        affects_result=False,
    )
    activation_checkpointing_segments: int | None = count(
        None, "recomputed parts of a Sequential", affects_result=False
    )
    compile: bool | dict[str, Any] = option(
        False,
        "torch.compile, or its arguments; `dynamic: false` if not given",
        nested_schema=CompileOptions,
        affects_result=False,
    )
    channels_last: bool = option(False, "memory format of images: faster convolutions")
    tf32: bool = option(False, "TensorFloat32 for float32 products, as in precision=tf32")
    cudnn_benchmark: bool = option(False, "let cuDNN try its algorithms: faster, not repeatable")
    deterministic: bool = option(False, "only algorithms that repeat bit by bit; slower on a GPU")
    detect_anomaly: bool = option(
        False, "find the operation that made a NaN; slow", affects_result=False
    )
    log_every_n_steps: int = count(50, "updates between two lines of metrics", affects_result=False)
    validate_every_n_epochs: int | None = count(1, "null = never by epochs")
    validate_every_n_steps: int | None = count(None, "null = never by steps")
    validate_at_start: int = natural(
        0, "validation batches tried before training, to fail early", affects_result=False
    )
    limit_train_batches: Limit = _limit("updates of an epoch: a number, or a fraction such as 0.1")
    limit_val_batches: Limit = _limit("the same for validation; 0 = none")
    limit_test_batches: Limit = _limit("the same for the test; 0 = none", affects_result=False)
    overfit_batches: Limit = _limit("train and validate on these few batches, unshuffled")

    seed: int = 0  # no key of its own: the configuration's `seed`, of what evaluations draw

    @property
    def seconds(self) -> float | None:
        """`max_time` in seconds."""
        if not isinstance(self.max_time, str):
            return self.max_time
        hours, minutes, seconds = map(float, self.max_time.split(":"))
        return 3600 * hours + 60 * minutes + seconds

    @property
    def micro_batches(self) -> int:
        """`gradient_accumulation_steps` as a number; 1 of `auto`, before it is found."""
        steps = self.gradient_accumulation_steps
        return steps if isinstance(steps, int) else 1

    @property
    def records_graphs(self) -> bool:
        """Whether the compiler is asked to record CUDA graphs."""
        asked = self.compile if isinstance(self.compile, dict) else {}
        options = asked.get("options") or {}
        by_mode = asked.get("mode") in ("reduce-overhead", "max-autotune")
        return by_mode or options.get("triton.cudagraphs") is True

    @property
    def validates(self) -> bool:
        """Whether there are validations before the very end."""
        return bool(self.validate_every_n_epochs or self.validate_every_n_steps)

    def idle_with_closure(self, precision: str) -> list[str]:
        """Return the keys without effect on an optimizer that computes its gradients itself.

        Such as LBFGS, which does so in a closure. `precision`: of the trainer.
        """
        idle = []
        for name, key in declared(TrainerConfig).items():
            value = precision if name == "precision" else getattr(self, name)
            if key.idle_with_closure is not None and key.idle_with_closure(value):
                idle.append(name)
        return idle

    def conflicts(self) -> Iterator[Problem]:
        """Name what cannot be meant."""
        if not (self.max_epochs or self.max_steps or self.max_time):
            message = "null, as are max_steps and max_time: nothing would end the run"
            yield Problem("max_epochs", message)
        for key in ("limit_train_batches", "overfit_batches"):
            if getattr(self, key) == 0:
                yield Problem(key, "0 leaves nothing to train on; null = no limit")
        if self.records_graphs and self.micro_batches > 1:
            # pytorch#96693, pytorch#169545: the graph's own memory becomes the gradient, and the
            # next micro-batch overwrites it without an error.
            message = "CUDA graphs of torch.compile overwrite gradients that are added up"
            hint = "set trainer.compile={mode: max-autotune-no-cudagraphs}, or true, or leave it 1"
            yield Problem("gradient_accumulation_steps", message, hint)
        if self.clip_grad_per_group and self.clip_grad_norm is None:
            yield Problem("clip_grad_per_group", "has no effect without clip_grad_norm")


@dataclass(kw_only=True, slots=True)
class TensorParallelConfig:
    """Layers of which each process of a group has a part."""

    size: int = count(1, "processes that share the work of a layer, on the same samples")
    plan: dict[str, str] | Literal["auto"] = option(
        "auto", "styles by globs over module names; auto = the model's own, of transformers"
    )


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    """Keys of the strategies of Regimen, whose classes stand in `STRATEGIES`.

    One device, several under one process (dp), or one process each (ddp, fsdp). A class of the
    user's, one derived from these too, is held against its own signature instead.
    """

    name: Literal["single", "dp", "ddp", "fsdp"] = _harmless("single", "in place of its `_target_`")
    accelerator: str = _harmless("auto", "cpu, or a kind that torch knows: cuda, mps, xpu, ...")
    devices: int | list[int] | Literal["auto"] = count(
        "auto",
        "how many, or their numbers; under torchrun the world decides",
        affects_result=False,
    )
    backend: str = _of_both("auto", "of torch.distributed; auto = the device's own, as nccl")
    timeout: float = positive(
        1800.0,
        "seconds after which a silent process has failed",
        strategies=_BOTH,
        affects_result=False,
    )
    max_restarts: int = natural(
        0,
        "restarts from the last checkpoint if one dies",
        strategies=_BOTH,
        affects_result=False,
    )
    device_ids: list[int] | None = _of_dp(None, "GPUs; null = all")
    output_device: int | None = natural(
        None, "GPU that gathers; null = the first", strategies=("dp",), affects_result=False
    )
    dim: int = _of_dp(0, "dimension along which a batch is split")
    find_unused_parameters: bool | None = _of_ddp(None, "some are unused; null = by the task")
    static_graph: bool = _of_ddp(False, "the same parameters each time")
    gradient_as_bucket_view: bool = _of_ddp(True, "saves a copy of the gradients")
    bucket_cap_mb: float | None = positive(
        None, "MB exchanged at once; null = torch's", strategies=("ddp",), affects_result=False
    )
    broadcast_buffers: bool = _of_ddp(
        True, "rank 0's buffers (BatchNorm's statistics) for all", affects_result=True
    )
    sync_batchnorm: bool = _of_both(
        False, "BatchNorm's statistics over all processes", affects_result=True
    )
    comm_hook: Literal["fp16_compress", "bf16_compress", "powersgd"] | None = _of_ddp(
        None, "compress gradients on their way", affects_result=True
    )
    comm_hook_options: dict[str, Any] = _of_ddp({}, "of powersgd's state", affects_result=True)
    wrap_modules: list[str] | None = _of_fsdp(None, "classes sharded as units; null = the whole")
    mixed_precision: Literal["bf16", "fp16"] | None = _of_fsdp(
        None,
        "format of sharded parameters in use; null = as trainer.precision",
        affects_result=True,
    )
    reshard_after_forward: bool = _of_fsdp(True, "free gathered parameters until backward")
    sharded_checkpoint: bool = _of_fsdp(False, "each process writes its own part of a checkpoint")
    cpu_offload: bool = _of_fsdp(False, "keep shards in host memory")
    shard_size: int | None = count(
        None,
        "processes that hold all shards once; null = all",
        strategies=("fsdp",),
        affects_result=False,
    )
    tensor_parallel: TensorParallelConfig | None = _of_fsdp(None, "layers split over processes")
    extra: dict[str, Any] = field(default_factory=dict)  # `_target_`

    @staticmethod
    def describes(raw: Mapping[str, Any]) -> bool:
        """Return whether a strategy is one of ours, so that these are all of its keys."""
        return strategy_node(raw)["_target_"] in STRATEGIES.values()

    def conflicts(self) -> Iterator[Problem]:
        """Name what the chosen strategy would pass over in silence."""
        if isinstance(self.devices, list) and (not self.devices or min(self.devices) < 0):
            yield Problem("devices", "expected a list of device numbers")
        for name in ("devices", "device_ids"):
            numbers = getattr(self, name)
            if isinstance(numbers, list) and len(set(numbers)) < len(numbers):
                yield Problem(name, f"names a device twice: {numbers}")
        number = len(self.devices) if isinstance(self.devices, list) else self.devices
        chosen = _short_name(self.extra.get("_target_", STRATEGIES[self.name]))
        if chosen == "single" and number not in (0, 1, "auto"):
            message = f"{number} devices need strategy=ddp, fsdp or dp: single has one"
            yield Problem("devices", message)
        if self.backend == "nccl" and self.accelerator == "cpu":
            yield Problem("backend", "nccl connects GPUs, but strategy.accelerator is cpu")
        for key, one in declared(StrategyConfig).items():
            has_effect = not one.strategies or chosen in one.strategies
            if not has_effect and getattr(self, key) != one.default:
                choices = " or ".join(f"strategy={user}" for user in one.strategies)
                yield Problem(key, f"has no effect with strategy={chosen}, only with {choices}")


def strategy_node(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of a strategy with its `_target_`, which a short `name` may stand for.

    The node of one of ours gets all keys that have an effect, and loses the others if they hold
    their default.
    """
    rest = dict(given)
    keys = declared(StrategyConfig)
    target = rest.pop("_target_", STRATEGIES["single"])
    if rest.get("name") in [*STRATEGIES]:
        if _short_name(target) is None:  # its keys go with the user's class that `name` replaces
            rest = {key: value for key, value in rest.items() if key in keys}
        target = STRATEGIES[rest.pop("name")]
    node = {"_target_": target, **rest}
    name = _short_name(target)
    for key, one in keys.items():
        if name is None or key == "name":
            continue
        if not one.strategies or name in one.strategies:
            node.setdefault(key, copy.copy(one.default))
        elif node.get(key) == one.default:
            node.pop(key, None)
    return node


def name_strategy_class(saved: dict[str, Any]) -> None:
    """Give a stored configuration's strategy its class, where an earlier version stored a name."""
    if isinstance(saved.get("strategy"), dict):
        saved["strategy"] = strategy_node(saved["strategy"])


def _short_name(target: Any) -> str | None:
    return next((name for name, path in STRATEGIES.items() if path == target), None)
