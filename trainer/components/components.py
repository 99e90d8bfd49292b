"""The parts of a training, built once: what an update, an evaluation and a snapshot are given."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from regimen.conf.python_words import in_python
from regimen.conf.schema_trainer import TrainerConfig
from regimen.data.batch import to_device
from regimen.trainer.callback import Average, Callback, evaluated_average
from regimen.trainer.checkpoints.borrowed import BorrowedWeights
from regimen.trainer.components.extra_state import ExtraState
from regimen.trainer.components.precision import Precision
from regimen.trainer.components.setup import is_from_python, set_up
from regimen.trainer.components.sources import StopAwareReader, as_source
from regimen.trainer.device import module_to_device
from regimen.trainer.distributed import Group
from regimen.trainer.lr_schedulers.schedule import Interval, LRSchedule, as_schedule
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.options import TrainerOptions, batches_of, horizon
from regimen.trainer.rng import RandomStates, derived_seed
from regimen.trainer.state import Timer, TrainState
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import Task, batch_dependence_warning, named_modules, updates_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """What a training consists of; `build_components` makes it.

    Which parts there are does not change any more, while many of them change in training. An
    evaluation has the same parts, without an optimizer.
    """

    # The network in three forms, which share their parameters:
    model: nn.Module  # as it was built; its names are those of checkpoints
    compiled_model: nn.Module  # as torch.compile returns it, or the model itself
    training_model: nn.Module  # as the strategy wraps it (DDP): what a training step calls

    task: Task
    optimizers: Optimizers
    lr_schedule: LRSchedule
    strategy: Strategy
    precision: Precision
    options: TrainerConfig
    callbacks: Mapping[str, Callback]  # by name
    average: Average | None  # the one whose weights are evaluated
    config_text: str  # the configuration; a part of every checkpoint
    data_facts: Mapping[str, Any]  # of the data sets, as plain values; likewise

    state: TrainState
    train_loader: Any  # a source of updates; None in an evaluation
    extra_state: ExtraState
    borrowed: BorrowedWeights
    random: RandomStates
    timer: Timer
    reader: StopAwareReader
    metrics: dict[str, float] = field(default_factory=dict)  # last values of all that was logged
    unlabelled_stages: set[str] = field(default_factory=set)  # for which a warning was logged

    @property
    def group(self) -> Group:
        """The processes that train as one."""
        return self.strategy.group

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.group.is_main

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The type of the model's floating-point parameters; None if it has none."""
        return _parameter_dtype(self.model)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device, in the run's number format."""
        return to_device(
            batch, self.strategy.device, self.precision.dtype, self.options.channels_last
        )

    def bind_loader(self, loader: Any) -> Any:
        """Return a loader of an evaluation that knows the processes of this run, and its device."""
        return _bound(loader, 1, self.strategy, self.parameter_dtype)

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of an epoch; None for a stream of unknown length."""
        limit = self.options.limit_train_batches
        batches = batches_of(self.train_loader, limit, "trainer.limit_train_batches")
        return None if batches is None else updates_in(batches, self.task)

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run, if its horizon is not a time."""
        return horizon(self.options, self.steps_per_epoch)

    @property
    def epochs(self) -> float | None:
        """Epochs of the whole run, if that is known."""
        if self.total_steps is None or not self.steps_per_epoch:
            return self.options.max_epochs
        return self.total_steps / self.steps_per_epoch


def _parameter_dtype(model: nn.Module) -> torch.dtype | None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None


def _bound(
    loader: Any, gradient_accumulation_steps: int, strategy: Strategy, dtype: torch.dtype | None
) -> Any:
    """Return a loader that knows how this run splits its updates, and its device.

    Only one of `regimen.loader` is another than before: it was made before any run was known.
    """
    if not hasattr(loader, "for_run"):
        return loader
    return loader.for_run(
        gradient_accumulation_steps,
        rank=strategy.group.data_rank,
        world_size=strategy.group.data_size,
        device=strategy.device,
        dtype=dtype,
    )


def build_components(
    model: nn.Module,
    task: Task,
    optimizer: Optimizers | Optimizer | None = None,
    train_loader: Any = None,
    lr_scheduler: Any = None,
    *,
    strategy: Strategy | None = None,
    precision: Precision | str | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    options: TrainerConfig | None = None,
    compiled: nn.Module | None = None,
    config_text: str = "",
    lr_interval: Interval | None = None,
    data_facts: Mapping[str, Any] | None = None,
) -> Components:
    """Return the parts of a training; without `optimizer` and `train_loader` of an evaluation.

    `model` is moved to the device, unless a `strategy` is given: then it has prepared the model.
    `callbacks` are by name. `options` are copied. `compiled`: the model as it is called, where the
    caller has compiled it. Raises ConfigError and ModelError for parts that do not fit together.
    """
    options = copy.copy(options) if options is not None else TrainerOptions(max_epochs=1)
    is_prepared = strategy is not None
    if strategy is None:
        strategy = Strategy()
    device = strategy.device

    precision = precision or options.precision
    if isinstance(precision, str):
        precision = Precision(precision, device.type)
    if not is_prepared:
        model = module_to_device(precision.convert(model), device)
    task.to(device, precision.dtype)
    strategy.check(named_modules(task))

    if optimizer is None:
        optimizers = Optimizers({}, {})
    else:
        optimizers = Optimizers.wrap(optimizer, model, named_modules(task))
    lr_schedule = as_schedule(lr_scheduler, lr_interval)
    callbacks = callbacks or {}
    average = evaluated_average(callbacks)

    compiled_model = set_up(model, compiled, options, precision.name)
    # A GAN's phase and a frozen layer leave parameters without a gradient, which DDP looks for.
    freezes = any(callback.freezes for callback in callbacks.values())
    strategy.has_unused_parameters = bool(task.turns) or freezes
    strategy.autocast = precision.autocast
    training_model = strategy.wrap(compiled_model)

    state = TrainState()
    group = strategy.group
    reader = StopAwareReader(state, alone=group.world_size == 1)
    if train_loader is not None:
        steps = options.micro_batches
        train_loader = as_source(train_loader, "train_loader", steps, options.seed)
        train_loader = reader.connect(
            _bound(train_loader, steps, strategy, _parameter_dtype(model))
        )

    extra_state = ExtraState(model, task, device)

    def isolated_seed() -> int:
        return derived_seed(options.seed, "isolated", state.updates, group.data_rank)

    return Components(
        model=model,
        compiled_model=compiled_model,
        training_model=training_model,
        task=task,
        optimizers=optimizers,
        lr_schedule=lr_schedule,
        strategy=strategy,
        precision=precision,
        options=options,
        callbacks=callbacks,
        average=average,
        config_text=config_text,
        data_facts=data_facts or {},
        state=state,
        train_loader=train_loader,
        extra_state=extra_state,
        borrowed=BorrowedWeights(extra_state.modules),
        random=RandomStates(strategy.local_devices, isolated_seed),
        timer=Timer(),
        reader=reader,
    )


def start_remarks(
    components: Components, order: str | None, schedule: Iterable[str | None]
) -> list[str]:
    """Return what the log says at the start of a training, in the words of who made the options.

    `order`, `schedule`: remarks on the order of the samples and on the learning rates.
    """
    split = batch_dependence_warning(
        components.task,
        components.model,
        components.options.micro_batches,
        components.strategy.data_parallel_size,
    )
    remarks = [remark for remark in (split, order, *schedule) if remark is not None]
    if is_from_python(components.options):
        remarks = [in_python(remark) for remark in remarks]
    return remarks
