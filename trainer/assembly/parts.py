"""From nodes to objects: a model, a task, callbacks; optimizers and schedules; the devices."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from regimen.conf.errors import ConfigError, Problem, collect_problems, problems_at, raise_problems
from regimen.conf.interpolation import CLASSES, fill, mapped, open_attributes
from regimen.conf.schema import Config, Node
from regimen.data.errors import DataError
from regimen.trainer.callback import Callback, Saver, check_hooks
from regimen.trainer.components.precision import Precision, compiled_regions
from regimen.trainer.components.recompute import recompute_as_asked
from regimen.trainer.device import is_async
from regimen.trainer.distributed import is_rank
from regimen.trainer.errors import ModelError, is_shape_error, short_message
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.lr_schedulers.schedule import LRSchedule
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from regimen.trainer.options import horizon
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.single import Single
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.allow_list import TargetError, locate
from regimen.trainer.targets.instantiate import instantiate
from regimen.trainer.task import Task, named_modules, updates_in

_GUESSED_STEPS = 1000  # stands for the updates of a run before its data are open
# Arguments that a sampler is given if its signature asks for them.
OFFERED = ("dataset", "data_source", "targets", "seed")
# What the nodes of a section must build, in words, and either its class or alternatives: the
# object needs all methods of one of these texts.
_REQUIRED: Mapping[str, tuple[str, type | tuple[str, ...]]] = {
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
    # `optimizer.optimizers.NAME.lr_scheduler` counts as an `lr_scheduler` node.
    place = "lr_scheduler." if "lr_scheduler" in key.split(".") else f"{key}."
    section = next(name for name in _REQUIRED if place.startswith(f"{name}."))
    description, required = _REQUIRED[section]
    if isinstance(required, type):
        fits = issubclass(cls, required)
    else:
        fits = any(_has_all(cls, names) for names in required)
    return None if fits else f"makes no {description} but a {cls.__module__}.{cls.__qualname__}"


def _has_all(cls: type, names: str) -> bool:
    return all(hasattr(cls, name) for name in names.split())


def build_node(node: Node, key: str, **arguments: Any) -> Any:
    """Build what a node describes, with further arguments.

    Raises ConfigError, also if it does not fit `key`.
    """
    try:
        built = instantiate(node, _key_=key, **arguments)
    except DataError as error:
        if key.startswith("loader."):  # built from the open data, which the error is about
            raise
        raise TargetError(key, str(error)) from error
    reason = wrong_class(key, type(built))
    if reason is not None:
        raise TargetError(f"{key}._target_", reason)
    if isinstance(built, Callback):
        with problems_at(key):
            check_hooks(built)
    return built


def build_named(nodes: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Build named nodes; null becomes None. Raises one ConfigError for all of them."""
    built = {}
    problems: list[Problem] = []
    for name, node in nodes.items():
        with collect_problems(problems):
            built[name] = build_node(node, f"{key}.{name}") if node else None
    raise_problems(problems)
    return built


def with_classes(node: Any, num_classes: int | None) -> Any:
    """Return `node` with the data's number of classes wherever it is open.

    It is open in each `num_classes: null` and each `${data.num_classes}`. Raises ConfigError if the
    number is needed and not known.
    """
    interpolation = f"${{{CLASSES}}}"

    def change(part: Any) -> Any:
        is_open = isinstance(part, dict) and part.get("num_classes", 0) is None
        if is_open and num_classes is not None:
            return {**part, "num_classes": num_classes}
        if is_open or (isinstance(part, str) and interpolation in part):
            raise ConfigError(
                CLASSES,
                "is null, and there is nothing to count: data.train has neither `classes` nor "
                "class numbers as `targets` (or a transform of single samples takes their number)",
                f"set {CLASSES}=...",
            )
        return part

    # `fill` leaves no interpolation if the number is known.
    return mapped(fill(node, {CLASSES: num_classes}), change)


def with_counted_classes(config: Config, num_classes: int | None) -> Config:
    """Return a configuration with the data's number of classes, wherever an argument takes it."""
    return _with_built_late(config, lambda node: with_classes(node, num_classes))


def with_attributes(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with the attributes of the training set that it asks for.

    `values`: by `data.train.NAME`. Raises ConfigError where one of them is not known.
    """
    attributes = open_attributes(asdict(config))
    if not attributes:
        return config
    for name in sorted(attributes.keys() - values.keys()):
        raise ConfigError(
            attributes[name][0],
            f"${{{name}}} is not known: training stores it in the run's inference.json",
        )
    return _with_built_late(config, lambda node: fill(node, values))


def _with_built_late(config: Config, change: Callable[[Any], Any]) -> Config:
    """Return a configuration whose nodes that are built behind the data sets are changed."""

    def changed(section: Any, *names: str) -> dict[str, Any]:
        return {name: change(getattr(section, name)) for name in names}

    loader = changed(config.loader, "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
    return replace(
        config,
        **changed(config, "model", "task", "optimizer", "lr_scheduler", "callbacks"),
        loader=replace(config.loader, **loader),
        transforms=replace(config.transforms, **changed(config.transforms, "device")),
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
        if not issubclass(kind, MultiProcess) and os.environ["WORLD_SIZE"] != "1":
            raise ModelError(
                "strategy",
                f"torchrun has started several processes, and {kind.name} trains in one",
                "start it by train, or take strategy=ddp",
            )
    elif issubclass(kind, MultiProcess):
        return kind.stand_in(**arguments)
    strategy: Strategy = build_node(config.strategy, "strategy")
    return strategy


@dataclass(frozen=True)
class Assembly:
    """The parts of a run; each is built once, at its first use.

    A run must use the model first, since parts draw random numbers. A mistake in a node raises
    ConfigError from the part that needs it. Facts that only the open data show may be None.
    """

    config: Config
    strategy: Strategy
    num_classes: int | None = None
    batches: int | None = None  # of an epoch, each of `loader.batch_size` samples
    classes: Sequence[str] | None = None  # names of the classes, if the data have any
    guessed: bool = False  # the numbers are placeholders of a check, which opens no data

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
        except (RuntimeError, LookupError, AttributeError) as error:
            # A layer may raise these for one of the network's arguments.
            if not is_shape_error(error):
                raise
            raise ModelError(
                "model",
                f"{node['_target_']} does not accept its arguments: {short_message(error)}",
            ) from error
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ModelError(
                    "model",
                    f"{name} is a lazy parameter",
                    "give its layer its sizes, or call it once",
                )
        if self.config.trainer.channels_last:
            for name, parameter in model.named_parameters():
                if parameter.ndim == 5:
                    raise ModelError(
                        "trainer.channels_last",
                        f"is a layout of images, and {name} is for volumes or videos",
                        "set it to false",
                    )
            model = model.to(memory_format=torch.channels_last)
        return self.strategy.prepare(self.precision.convert(model))

    @cached_property
    def checkpointed(self) -> list[str]:
        """Names of the modules whose activations are recomputed in the backward pass."""
        return recompute_as_asked(self.model, self.config.trainer)

    @cached_property
    def regions(self) -> list[nn.Module] | None:
        """The modules that are compiled one by one; None if the model is compiled as a whole."""
        return compiled_regions(self.model, self.config.trainer.compile)

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
    def steps_per_epoch(self) -> int | None:
        """Updates of an epoch."""
        return None if self.batches is None else updates_in(self.batches, self.task)

    @cached_property
    def total_steps(self) -> int | None:
        """Updates of the whole run; None if only the time ends it."""
        total = horizon(self.config.trainer, self.steps_per_epoch)
        return _GUESSED_STEPS if self.guessed and total is not None else total

    @cached_property
    def optimizers(self) -> Optimizers:
        """The optimizers over the parameters of model and task."""
        # Reserved interpolations stay: an optimizer's own schedule fills them with what remains of
        # the run after its warm-up.
        return build_optimizers(
            self.model,
            self.config.optimizer,
            # A fused step skips a non-finite update in its kernel: its state need not be copied.
            prefer_fused=is_async(self.strategy.device),
            others=named_modules(self.task),
            batch_size=self.config.loader.batch_size,
        )

    @cached_property
    def schedule(self) -> LRSchedule:
        """The schedule of all optimizers' learning rates."""
        return build_lr_schedule(
            self.config.lr_scheduler,
            self.optimizers,
            self.total_steps,
            self.steps_per_epoch,
            self.guessed,
            self.task.modes(),
        )

    @cached_property
    def callbacks(self) -> dict[str, Callback]:
        """The callbacks, in the order of the configuration with two exceptions.

        Callbacks that change weights come first, and those that save checkpoints come last.
        """
        lengths = {"total_steps": self.total_steps, "steps_per_epoch": self.steps_per_epoch}
        built = build_named(fill(self.config.callbacks, lengths), "callbacks")
        names = [name for name in built if built[name] is not None]
        names.sort(key=lambda name: _position(built[name]))
        return {name: built[name] for name in names}


def _position(callback: Callback) -> int:
    if callback.changes_weights:
        return 0
    return 2 if isinstance(callback, Saver) else 1
