"""What can be hooked into a run: the moments of the loop, as methods to override."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trainer.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.trainer import Trainer


class Callback:
    """Do one thing at some moments of a run; `Trainer.fit` draws the moments in its docstring.

    Only overridden hooks are called. No hook but `scalars`, `on_log` and those after it in a
    boundary may read a tensor on the host: the loop does not wait for the device in between.
    """

    name: str = ""  # the key in the config, and of the state in a checkpoint
    of_run: bool = False  # its state tells of the run directory's files: another run's is no use
    changes_weights: bool = False  # after an update: called before those that read them
    takes_shards: bool = True  # does its work where each process has a part of every parameter

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if it does not fit the model, whose weights may have no values yet."""

    def explain(self, trainer: Trainer) -> Iterable[str]:
        """Return lines for the plan of a run, which is built and not begun."""
        return ()

    def setup(self, trainer: Trainer) -> None:
        """Prepare: everything is built, nothing is loaded or trained."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin; a checkpoint, if any, has been loaded."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Begin an epoch, or go on within one after a resume."""

    def on_update_end(self, trainer: Trainer) -> None:
        """Follow an update, applied or skipped."""

    def scalars(self, trainer: Trainer) -> Mapping[str, float]:
        """Contribute values to a log line of training."""
        return {}

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Receive the values logged at `trainer.state.global_step`."""

    def on_validation_start(self, trainer: Trainer) -> None:
        """Precede a validation."""

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Receive a validation's metrics, `val/...`."""

    def on_boundary(self, trainer: Trainer) -> None:
        """Stand between two updates, logging and validation done: the moment to save."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Close an epoch; `trainer.state.epoch` counts it already."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """See the run fail."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Close a run that was not broken by an exception."""

    def teardown(self, trainer: Trainer) -> None:
        """Release what `setup` took, whatever happened."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain containers only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class Average(Callback):
    """A callback that keeps an average of the weights, under any name.

    One of a run is evaluated instead of the weights; others say so by `used_for_evaluation`.
    """

    used_for_evaluation: bool = True

    def swap(self, trainer: Trainer) -> AbstractContextManager[Any]:
        """Return the context in which the model has the average's weights."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average's own tensors, named as the model's state: pruning changes them."""
        raise NotImplementedError


class Saver(Callback):
    """A callback that writes checkpoints, under any name: called last, when all others are done.

    Its state may hold a `ranking`, pairs of step and value with the best first: of these
    checkpoints, the ones that a run keeps when it goes back to an earlier step.
    """

    of_run = True

    def best_result(self) -> tuple[str, float, int] | None:
        """Return metric, value and step of the best checkpoint, if one was chosen."""
        return None


class Hooks:
    """Call each hook on the callbacks that override it, in the order of the config."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        callbacks = list(callbacks)
        others = ("setup", "teardown", "scalars")
        names = [n for n in vars(Callback) if n.startswith("on_") or n in others]
        self._listeners = {
            name: [
                getattr(callback, name)
                for callback in callbacks
                if getattr(type(callback), name) is not getattr(Callback, name)
            ]
            for name in names
        }

    def emit(self, hook: str, *args: Any) -> None:
        """Call `hook` of every callback that has one."""
        for listener in self._listeners[hook]:
            listener(*args)

    def listeners(self, hook: str) -> list[Any]:
        """Return the bound methods that `emit` would call."""
        return self._listeners[hook]


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


def saver_of(callbacks: Mapping[str, Callback]) -> Saver | None:
    """Return the callback that writes checkpoints; the first if there are several."""
    return next((c for c in callbacks.values() if isinstance(c, Saver)), None)
