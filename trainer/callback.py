"""The interface of callbacks: hooks that the loop calls at fixed points."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from regimen.conf.errors import did_you_mean
from regimen.data.batch import MicroBatch
from regimen.trainer.errors import ModelError
from regimen.trainer.media import Media
from regimen.trainer.task import Task

# A `regimen.trainer.trainer.Trainer`, which is made with callbacks: its module imports this one.
# Callbacks outside of `trainer` name the class itself.
Trainer: TypeAlias = Any

_log = logging.getLogger(__name__)
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # in a class's name
UPDATE_PARTS = ("batch", "outputs")  # what `on_update_end` is given if it has such parameters


@dataclass(frozen=True, slots=True)
class Results:
    """How a run ended, after its test.

    `state`: finished, pruned (by its search), stopped (by its time limit), preempted (by a signal)
    or failed.
    """

    state: str
    metrics: Mapping[str, float] = field(default_factory=dict)  # last values, best and test
    code: int = 0  # the exit code
    reason: str | None = None  # why it did not finish


class Callback:
    """Base class of callbacks; the docstring of `Trainer.fit` shows when each hook is called.

    Only overridden hooks are called. Only `scalars`, `on_log` and the hooks after it in a boundary
    may read a tensor on the host, since the loop does not wait for the device elsewhere.
    """

    name: str = ""  # the key in the config, and of the state in a checkpoint
    of_run: bool = False  # its state describes files of the run directory, and fits no other run
    changes_weights: bool = False  # after an update: called before those that read them
    freezes: bool = False  # parameters get no gradient in some updates: DDP has to look for them
    supports_sharding: bool = True  # does its work where each process has a part of every parameter
    affects_result: bool = True  # False: a resumed run may add it, change it or leave it out
    keeps_weights: bool = True  # False: it measures, and the weights of its run are of no use
    shows_progress: bool = False  # prints the progress of a run: a Trainer adds no lines of its own
    persistent: tuple[str, ...] = ()  # attributes that are its state, if they are all of it

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if it does not fit the model, whose weights may have no values yet."""

    def check_task(self, task: Task, stages: Iterable[str]) -> None:
        """Raise ConfigError if it does not fit the task; `stages`: of the validation sets."""

    def explain(self, trainer: Trainer) -> Iterable[str]:
        """Return lines for the plan of a run, which is built and not begun."""
        return ()

    def setup(self, trainer: Trainer) -> None:
        """Called when everything is built, before a checkpoint is loaded.

        A Trainer whose `fit` is called again calls it again, after the `teardown` of the first.
        """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before training; a checkpoint, if any, has been loaded."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Called at the start of an epoch, or of the rest of an epoch after a resume."""

    def on_update_start(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        """Called with an update's micro-batches of this process, on the device, transformed."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Called when the gradients are clipped, before the step; of a GAN, in each turn."""

    def on_update_end(self, trainer: Trainer) -> None:
        """Called after each update, applied or skipped.

        An override may have the further parameters `batch` and `outputs`, both or one of them: the
        samples of the update on this process, its micro-batches joined, and a list with the
        `StepOutput` of each micro-batch. They stay in memory until the next update.
        """

    def scalars(self, trainer: Trainer) -> Mapping[str, float]:
        """Return values to add to a log line of training."""
        return {}

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Called with values logged at `trainer.log_point`: `step` and `epoch`."""

    def on_media(self, trainer: Trainer, name: str, media: Media) -> None:
        """Called, on the main process only, with an image, a histogram, a text or a PR curve.

        An image or a figure comes as uint8 [H, W, 3], a text as Markdown: `regimen.trainer.media`.
        """

    def on_validation_start(self, trainer: Trainer) -> None:
        """Called before a validation."""

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Called with a batch of a validation and what the model answered, on the device.

        `output` is `StepOutput.output`, which a task of one's own may leave None. A process is not
        called where it has no sample of its own.
        """

    def on_evaluation_batch(
        self, trainer: Trainer, stage: str, done: int, batches: int | None
    ) -> None:
        """Called after each batch of an evaluation (`stage`: val or test); may not read tensors."""

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Called after a validation with its metrics, `val/...`."""

    def on_boundary(self, trainer: Trainer) -> None:
        """Called between two updates, after logging and validation: the time to save."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Called at the end of an epoch, which `trainer.state.epoch` already includes."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called when the run fails with an exception."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called at the end of a run without an exception."""

    def teardown(self, trainer: Trainer) -> None:
        """Release what `setup` acquired; called in any case."""

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Called last, after the test, however the run ended; no collectives here.

        An exception in it is logged and changes nothing: the run has ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors and plain containers only."""
        return {name: copy.copy(getattr(self, name)) for name in self.persistent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        vars(self).update({name: state[name] for name in self.persistent})


class Average(Callback):
    """Base class of callbacks that keep an average of the weights, whatever their name.

    At most one callback of a run may set `used_for_evaluation`: its average is evaluated instead of
    the weights. A later evaluation or prediction, which has no trainer, calls none of its hooks,
    only `load_state_dict` and `swap`.
    """

    used_for_evaluation: bool = True

    @property
    def begun(self) -> bool:
        """Whether there is an average yet, which evaluations use."""
        return True

    def swap(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `model` has the average's weights, once there is one.

        It may be entered within another one. Afterwards the weights are as before, bit for bit.
        """
        raise NotImplementedError

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average's own tensors, named as the model's state: pruning changes them."""
        raise NotImplementedError


class Saver(Callback):
    """Base class of callbacks that write checkpoints, whatever their name; called last.

    Its state may hold a `ranking`: pairs of step and value, the best first. These are the
    checkpoints that a run keeps when it goes back to an earlier step.
    """

    of_run = True
    # Whether checkpoints leave out frozen weights that were read from files.
    borrow: bool | None = None  # None: as the model says

    @property
    def monitor(self) -> str | None:
        """The metric that the best checkpoint is chosen by, if there is one."""
        return None

    def best_result(self) -> tuple[str, float, int] | None:
        """Return metric, value and step of the best checkpoint, or None."""
        return None

    def improves(self, value: float, than: float | None) -> bool:
        """Whether a value of the monitored metric is better than another, or the first."""
        return False


class Hooks:
    """Call each hook on the callbacks that override it, in the order of the config.

    `trainer`: the first argument of every hook.
    """

    def __init__(self, callbacks: Iterable[Callback], trainer: Trainer) -> None:
        self._trainer = trainer
        self._listeners: dict[str, list[Any]] = {name: [] for name in _HOOKS}
        self.asks_for_batches = False  # whether a callback is given an update's batch or outputs
        for callback in callbacks:
            parts = check_hooks(callback)
            self.asks_for_batches |= bool(parts)
            for name, hook in _overridden(callback).items():
                if name == "on_update_end" and parts:
                    hook = partial(_with_batch, hook, parts)
                self._listeners[name].append(hook)

    def emit(self, hook: str, *args: Any) -> None:
        """Call `hook` of every callback that overrides it, with the trainer and `args`."""
        for listener in self._listeners[hook]:
            listener(self._trainer, *args)

    def listeners(self, hook: str) -> list[Any]:
        """Return the bound methods that `emit` would call."""
        return self._listeners[hook]


_HOOKS = {
    name: hook
    for name, hook in vars(Callback).items()
    if inspect.isfunction(hook) and not name.startswith("_")
}


def _overridden(callback: Callback) -> dict[str, Any]:
    own = [n for n, base in _HOOKS.items() if getattr(type(callback), n) is not base]
    return {name: getattr(callback, name) for name in own}


def check_hooks(callback: Callback) -> list[str]:
    """Return which of `batch` and `outputs` its `on_update_end` asks for.

    Raises ModelError for a hook with wrong parameters; warns of names that are nearly a hook's.
    """
    requested: list[str] = []
    for name, hook in _overridden(callback).items():
        _, *required = inspect.signature(_HOOKS[name]).parameters
        signature = inspect.signature(hook)
        optional = UPDATE_PARTS if name == "on_update_end" else ()
        parts = [part for part in optional if part in signature.parameters]
        try:
            signature.bind(*required, **dict.fromkeys(parts))
        except TypeError as error:
            further = f", and may have {' and '.join(optional)}" if optional else ""
            raise ModelError(
                f"{hook.__qualname__} must take ({', '.join(['self', *required])}){further}: "
                f"{error}"
            ) from None
        requested += parts
    for name in dir(type(callback)):
        if not name.startswith("on_") or name in _HOOKS:
            continue
        hint = did_you_mean(name, _HOOKS)
        if hint:
            _log.warning(
                "warning: %s.%s is no hook and is never called; %s",
                type(callback).__qualname__,
                name,
                hint,
            )
    return requested


def _with_batch(hook: Any, names: list[str], trainer: Trainer) -> None:
    parts = trainer.updater.last_update()
    hook(trainer, **{name: parts[name] for name in names})


def named_callbacks(callbacks: Mapping[str, Callback] | Iterable[Callback]) -> dict[str, Callback]:
    """Return callbacks by name; one of a list is named as its class, in snake_case.

    A second one of a class is named `<name>_2`. Raises ModelError for what is no callback.
    """
    if isinstance(callbacks, Mapping):
        named = dict(callbacks)
    else:
        named = {}
        for callback in callbacks:
            base = _WORDS.sub("_", type(callback).__name__).lower()
            name = base
            number = 1
            while name in named:
                number += 1
                name = f"{base}_{number}"
            named[name] = callback
    for name, callback in named.items():
        if not isinstance(callback, Callback):
            if isinstance(callback, type):
                kind = f"the class {callback.__name__}"
            else:
                kind = f"of type {type(callback).__name__}"
            raise ModelError(
                f"callbacks: {name!r} is {kind}: give objects of regimen.Callback, in a list or as "
                "a dict by name, such as [EMA()] or {'ema': EMA()}"
            )
        callback.name = name
    return named


def evaluated_average(callbacks: Mapping[str, Callback]) -> Average | None:
    """Return the average that is evaluated instead of the weights. ModelError if there are two."""
    averages = [c for c in callbacks.values() if isinstance(c, Average) and c.used_for_evaluation]
    if len(averages) > 1:
        names = " and ".join(f"callbacks.{callback.name}" for callback in averages)
        raise ModelError(
            f"{names} each keep an average of the weights that would be evaluated: set "
            "use_for_evaluation=false for all but one"
        )
    return averages[0] if averages else None


def average_of(callbacks: Mapping[str, Callback], name: str | None = None) -> Average:
    """Return the average of that name; without one that is evaluated, or the only one.

    Raises ModelError where there is none, or where it is not clear which one is meant.
    """
    averages = {key: c for key, c in callbacks.items() if isinstance(c, Average)}
    evaluated = evaluated_average(averages)
    if name is None and evaluated is not None:
        return evaluated
    if name is None and len(averages) == 1:
        return next(iter(averages.values()))
    if name in averages:
        return averages[name]
    wanted = "average_weights()" if name is None else f"average_weights({name!r})"
    if not averages:
        raise ModelError(
            f"{wanted}: no callback keeps an average of the weights: add one, such as "
            "'callbacks=[default,ema]'"
        )
    raise ModelError(
        f"{wanted}: the averages are {', '.join(averages)}: give the name of one of them"
    )


def saver_of(callbacks: Mapping[str, Callback]) -> Saver | None:
    """Return the callback that writes checkpoints; the first if there are several."""
    return next((c for c in callbacks.values() if isinstance(c, Saver)), None)


def losses_of(trainer: Trainer, name: str) -> list[str]:
    """Return the keys that the loss called `name` is logged by: one for each turn of a GAN."""
    return [f"{name}_{turn}" for turn in trainer.task.turns] or [name]


def keeps_weights(callbacks: Mapping[str, Callback]) -> bool:
    """Return whether the weights of a run with these callbacks are of use."""
    return all(callback.keeps_weights for callback in callbacks.values())
