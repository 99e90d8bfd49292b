"""From nodes to objects: a model, a task, callbacks; optimizers and schedules; the devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from regimen.conf.errors import ConfigError, Problem, collect_problems, problems_at, raise_problems
from regimen.conf.interpolation import CLASSES, fill, mapped
from regimen.conf.schema import Config, Node
from regimen.data.errors import DataError
from regimen.trainer.callback import Callback, Saver, check_hooks
from regimen.trainer.device import is_async
from regimen.trainer.distributed import is_rank
from regimen.trainer.errors import ModelError, is_shape_error, short_message
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.lr_schedulers.schedule import LRSchedule
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.single import Single
from regimen.trainer.strategies.strategy import Strategy, instances
from regimen.trainer.targets.allow_list import TargetError, locate
from regimen.trainer.targets.instantiate import instantiate
from regimen.trainer.task import Task, named_modules
from regimen.trainer.update.precision import Precision, checkpoint_modules, checkpoint_segments

# Arguments that a sampler is given if its signature asks for them.
OFFERED = ("dataset", "data_source", "targets", "seed")
# What the nodes of a section must build: objects of a class, or with all methods of one line.
_KINDS: Mapping[str, tuple[str, type | tuple[str, ...]]] = {
    "model": ("torch.nn.Module", nn.Module),
    "task": ("regimen.trainer.task.Task", Task),
    "callbacks": ("regimen.trainer.callback.Callback", Callback),
    "optimizer": ("torch.optim.Optimizer", Optimizer),
    "lr_scheduler": ("torch.optim.lr_scheduler.LRScheduler", LRScheduler),
    "strategy": ("regimen.trainer.strategies.strategy.Strategy", Strategy),
    "transforms": ("function", ("__call__",)),
    "loader.sampler": ("sampler", ("__iter__", "__getitem__", "__call__ __len__")),
    "loader.batch_sampler": ("batch sampler", ("__iter__", "__getitem__", "samples")),
    "loader": ("function", ("__call__",)),
    "data": (
        "data set (with __getitem__ and __len__, or __iter__)",
        ("__iter__", "__getitem__ __len__"),
    ),
}


def wrong_class(key: str, cls: type) -> str | None:
    """Return why objects of `cls` do not fit the node at `key`; None if they do."""
    # Also the schedule of one optimizer among several.
    place = "lr_scheduler." if "lr_scheduler" in key.split(".") else f"{key}."
    called, wanted = next(kind for name, kind in _KINDS.items() if place.startswith(f"{name}."))
    if isinstance(wanted, type):
        fits = issubclass(cls, wanted)
    else:
        fits = any(all(hasattr(cls, name) for name in line.split()) for line in wanted)
    return None if fits else f"makes no {called} but a {cls.__module__}.{cls.__qualname__}"


def build_node(node: Node, key: str, **given: Any) -> Any:
    """Build what a node describes, with further arguments.

    Raises ConfigError, also if it does not fit `key`.
    """
    try:
        made = instantiate(node, _key_=key, **given)
    except DataError as error:
        if key.startswith("loader."):  # about the data, which only then are open
            raise
        raise TargetError(key, str(error)) from error
    if (reason := wrong_class(key, type(made))) is not None:
        raise TargetError(f"{key}._target_", reason)
    if isinstance(made, Callback):
        with problems_at(key):
            check_hooks(made)
    return made


def build_named(nodes: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Build named nodes; null becomes None. Raises one ConfigError for all of them."""
    made = {}
    problems: list[Problem] = []
    for name, node in nodes.items():
        with collect_problems(problems):
            made[name] = build_node(node, f"{key}.{name}") if node else None
    raise_problems(problems)
    return made


def with_classes(node: Any, num_classes: int | None) -> Any:
    """Return `node` with the data's number of classes where it is open.

    Open is each `num_classes: null`, and each `${data.num_classes}`, which is left where that is
    null. Raises ConfigError if the number is needed and not known.
    """

    def change(part: Any) -> Any:
        named = isinstance(part, dict) and part.get("num_classes", 0) is None
        if num_classes is None and (named or (isinstance(part, str) and counted in part)):
            raise ConfigError(
                CLASSES,
                "is null, and there is nothing to count: data.train has neither `classes` nor "
                "class numbers as `targets` (or a transform of single samples takes their number)",
                f"set {CLASSES}=...",
            )
        return {**part, "num_classes": num_classes} if named else part

    counted = f"${{{CLASSES}}}"
    return mapped(fill(node, {CLASSES: num_classes}), change)


def with_counted_classes(config: Config, num_classes: int | None) -> Config:
    """Return a configuration with the data's number of classes, wherever an argument takes it."""
    loader = config.loader
    nodes = ("sampler", "batch_sampler", "collate_fn", "worker_init_fn")
    made = {name: with_classes(getattr(loader, name), num_classes) for name in nodes}
    parts = ("model", "task", "optimizer", "lr_scheduler", "callbacks")
    filled = {name: with_classes(getattr(config, name), num_classes) for name in parts}
    device = with_classes(config.transforms.device, num_classes)
    return replace(
        config,
        **filled,
        loader=replace(loader, **made),
        transforms=replace(config.transforms, device=device),
    )


def strategy_class(config: Config) -> tuple[type[Strategy], dict[str, Any]]:
    """Return the class of a configuration's strategy, and its arguments. Raises TargetError."""
    arguments = dict(config.strategy)
    return locate(arguments.pop("_target_")), arguments


def build_strategy(config: Config) -> Strategy:
    """Build the strategy of a configuration; of several processes, this one's part.

    A process that is alone gets a stand-in for a strategy of several.
    """
    kind, arguments = strategy_class(config)
    if is_rank():
        if kind is Single:
            # torchrun started several processes: each trains a replica.
            return DDP(**arguments)
    elif issubclass(kind, MultiProcess):
        return kind.stand_in(**arguments)
    strategy: Strategy = build_node(config.strategy, "strategy")
    return strategy


@dataclass(frozen=True)
class Assembly:
    """The parts of a run; each is built once, at its first use.

    A run must use the model first, since parts draw random numbers. A mistake in a node raises
    ConfigError from the part that needs it. What the data tell is None as long as it is unknown.
    """

    config: Config
    strategy: Strategy
    num_classes: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    classes: Sequence[str] | None = None  # their names, if the data have any
    guessed: bool = False  # these numbers are placeholders of a check, which opens no data

    @cached_property
    def precision(self) -> Precision:
        """The format of the forward passes on the device."""
        kind = self.strategy.device.type
        return Precision(self.config.trainer.precision, "cpu" if kind == "meta" else kind)

    @cached_property
    def model(self) -> nn.Module:
        """The model on its device, in its dtype."""
        node = with_classes(self.config.model, self.num_classes)
        try:
            model: nn.Module = build_node(node, "model")
        except (RuntimeError, LookupError, AttributeError) as error:  # a layer's, of an argument
            if not is_shape_error(error):
                raise
            message = f"{node['_target_']} does not accept its arguments: {short_message(error)}"
            raise ModelError("model", message) from error
        if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
            hint = "give its layer its sizes, or call it once"
            raise ModelError("model", f"{lazy[0]} is a lazy parameter", hint)
        if self.config.trainer.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return self.strategy.prepare(self.precision.convert(model))

    @cached_property
    def checkpointed(self) -> list[str]:
        """Names of the modules whose activations are recomputed in the backward pass."""
        options = self.config.trainer
        compiled = options.compile is not False
        if options.activation_checkpointing_segments is not None:
            checkpoint_segments(self.model, options.activation_checkpointing_segments, compiled)
        return checkpoint_modules(self.model, options.activation_checkpointing or [], compiled)

    @cached_property
    def regions(self) -> list[nn.Module] | None:
        """The modules that are compiled by themselves; None where it is the model as a whole."""
        choice, key = self.config.trainer.compile, "trainer.compile.regions"
        classes = choice.get("regions") if isinstance(choice, dict) else None
        return None if classes is None else instances(self.model, classes, key)

    @cached_property
    def task(self) -> Task:
        """The task, moved to the device."""
        task: Task = build_node(with_classes(self.config.task, self.num_classes), "task")
        for metric in task.metrics().values():
            name_classes = getattr(metric, "name_classes", None)
            if name_classes is not None and not self.guessed:
                name_classes(self.classes or [])
        task.to(self.strategy.device, self.precision.dtype)
        return task

    @cached_property
    def optimizers(self) -> Optimizers:
        """The optimizers over the parameters of model and task."""
        # Reserved interpolations stay: an optimizer's own schedule fills them with what remains of
        # the run after its warm-up. A fused step skips a non-finite update in its kernel, so
        # that its state need not be copied.
        node, fused = self.config.optimizer, is_async(self.strategy.device)
        others = named_modules(self.task)
        return build_optimizers(self.model, node, prefer_fused=fused, others=others)

    @cached_property
    def schedule(self) -> LRSchedule:
        """The schedule of all optimizers' learning rates."""
        lengths = self.total_steps, self.steps_per_epoch
        node, modes = self.config.lr_scheduler, self.task.modes()
        return build_lr_schedule(node, self.optimizers, *lengths, self.guessed, modes)

    @cached_property
    def callbacks(self) -> dict[str, Callback]:
        """The callbacks, in the order of the configuration with two exceptions.

        Callbacks that average weights come first, and the one that saves checkpoints comes last.
        """
        lengths = {"total_steps": self.total_steps, "steps_per_epoch": self.steps_per_epoch}
        built = build_named(fill(self.config.callbacks, lengths), "callbacks")
        kept = {name: callback for name, callback in built.items() if callback is not None}
        turns = {n: isinstance(c, Saver) - c.changes_weights for n, c in kept.items()}
        return {name: kept[name] for name in sorted(kept, key=turns.__getitem__)}
