"""Base classes of callbacks that show something of a validation, and when it is due."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.support.errors import CallbackError
from trainer.callback import Callback
from trainer.runs.status import INFERENCE, RunDirectoryError, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.trainer import Trainer


def is_due(count: int, every: int | None) -> bool:
    """Return whether the `count`-th time is due: each `every`-th, or the 1st, 4th, 16th, 64th..."""
    if every is not None:
        return count % every == 0
    return count & (count - 1) == 0 and count.bit_length() % 2 == 1


def check_every(every: int | None, name: str = "every_n_validations") -> int | None:
    """Return an interval. Raises CallbackError for one below 1."""
    if every is not None and every < 1:
        raise CallbackError(f"{name}={every}: choose at least 1, or null for the 1st, 4th, 16th...")
    return every


def class_names(trainer: Trainer, count: int) -> list[str]:
    """Return the names of the classes, or their numbers if the data have no names."""
    names: Any = None
    if trainer.run_dir is not None:
        path = trainer.run_dir / INFERENCE
        with suppress(OSError, RunDirectoryError):
            names = _classes(path, path.stat().st_mtime_ns)
    known = isinstance(names, list) and len(names) == count
    return [str(name) for name in names] if known else [str(index) for index in range(count)]


@lru_cache(1)  # of several pictures of one validation
def _classes(path: Path, changed: int) -> Any:
    return read_json(path).get("classes")


def check_count(count: int) -> int:
    """Return a number of samples. Raises CallbackError for one below 1."""
    if count < 1:
        raise CallbackError(f"count={count}: choose at least 1")
    return count


def labels_of(target: Tensor) -> Tensor:
    """Return the class of each sample; of soft targets (MixUp) the largest."""
    return target.argmax(1) if target.is_floating_point() else target


def code_block(text: str) -> str:
    """Return text as a code block in Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class ValidationPicture(Callback):
    """Base class: collect from the batches of a validation, and show at its end.

    `every_n_validations`: null for the 1st, 4th, 16th... and the last, which costs a long run
    hardly any time. `collect` gets each batch on the device and must not wait for it; `show` is
    called once after the last batch, on all processes.
    """

    def __init__(self, every_n_validations: int | None = None) -> None:
        self._every = check_every(every_n_validations)
        self._count = 0  # validations so far
        self._due = False

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the outputs of the task can be shown."""
        return True

    def start(self, trainer: Trainer) -> None:
        """Drop what was collected."""

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Collect from a batch."""
        raise NotImplementedError

    def show(self, trainer: Trainer) -> None:
        """Log what was collected; a collective of all processes."""
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer) -> None:
        """Decide whether this validation is shown."""
        regular = is_due(self._count + 1, self._every)
        self._due = self.fits(trainer) and (regular or (self._every is None and trainer.done))
        if self._due:
            self.start(trainer)

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Collect from a batch that is shown."""
        if self._due and output is not None:
            self.collect(trainer, batch, output)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show what was collected."""
        self._count += 1
        if self._due:
            self.show(trainer)
            self.start(trainer)  # frees the memory

    def state_dict(self) -> dict[str, Any]:
        """Return the number of validations."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the number of validations."""
        self._count = int(state["count"])


class KeptSamples(ValidationPicture):
    """Base class: keep something of `count` samples of a validation, on their device."""

    def __init__(self, count: int = 16, every_n_validations: int | None = None) -> None:
        super().__init__(every_n_validations)
        self._wanted = check_count(count)
        self._kept: Any = None

    def start(self, trainer: Trainer) -> None:
        """Drop what was kept."""
        self._kept = None
