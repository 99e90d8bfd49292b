"""What can be hooked into a run: the moments of the loop, as methods to override."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import ModelError

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Callback:
    """Do one thing at some moments of a run; `Trainer.fit` draws the moments in its docstring.

    Only overridden hooks are called. No hook but `scalars`, `on_log` and those after it in a
    boundary may read a tensor on the host: the loop does not wait for the device in between.
    """

    name: str = ""  # the key in the config, and of the state in a checkpoint
    of_run: bool = False  # its state tells of the run directory's files: another run's is no use

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


def judged_average(callbacks: Mapping[str, Callback]) -> Callback | None:
    """Return the callback whose average of the weights is evaluated instead of the weights.

    Such a callback has a method `swap`, a context in which the model has the average, and may say
    by `used_for_evaluation` that it only keeps one. Raises ModelError if there are two.
    """
    found = [
        callback
        for callback in callbacks.values()
        if hasattr(callback, "swap") and getattr(callback, "used_for_evaluation", True)
    ]
    if len(found) > 1:
        names = " and ".join(f"callbacks.{callback.name}" for callback in found)
        raise ModelError(
            f"{names} each keep an average of the weights that would be evaluated: set "
            "use_for_evaluation=false for all but one"
        )
    return found[0] if found else None
