"""What callbacks share that show something of a validation, or of the training now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from callbacks.support.errors import CallbackError
from trainer.callback import Callback
from trainer.runs.status import INFERENCE, RunDirectoryError, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.trainer import Trainer


def is_due(count: int, every: int | None) -> bool:
    """Return whether to act the `count`-th time: each `every`-th, or the 1st, 2nd, 4th, 8th..."""
    return count & (count - 1) == 0 if every is None else count % every == 0


def check_every(every: int | None, name: str = "every_n_validations") -> int | None:
    """Return an interval. Raises CallbackError for one below 1."""
    if every is not None and every < 1:
        raise CallbackError(f"{name}={every}: choose at least 1, or null for the 1st, 2nd, 4th...")
    return every


def class_names(trainer: Trainer, count: int) -> list[str]:
    """Return the names of the classes, or their numbers where the data have none."""
    names: Any = None
    if trainer.run_dir is not None:
        try:
            names = read_json(trainer.run_dir / INFERENCE).get("classes")
        except RunDirectoryError:
            names = None
    known = isinstance(names, list) and len(names) == count
    return [str(name) for name in names] if known else [str(index) for index in range(count)]


def check_count(count: int) -> int:
    """Return a number of samples. Raises CallbackError for one below 1."""
    if count < 1:
        raise CallbackError(f"count={count}: choose at least 1")
    return count


def labels_of(target: Tensor) -> Tensor:
    """Return the class of each sample; of soft targets (MixUp) the largest."""
    return target.argmax(1) if target.is_floating_point() else target


def code_block(text: str) -> str:
    """Return text as a block of code in Markdown, which shows it as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class ValidationPicture(Callback):
    """Base class: collect from the batches of a validation, and show at its end.

    `every_n_validations`: null for the 1st, 2nd, 4th, 8th... and the last; so a long run spends
    hardly any time on it. `collect` is called with each batch, on the device, and does not wait for
    it; `show` once after the last batch, on all processes.
    """

    def __init__(self, every_n_validations: int | None = None) -> None:
        self._every = check_every(every_n_validations)
        self._count = 0  # validations so far
        self._due = False

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task is one whose answers can be shown."""
        return True

    def start(self, trainer: Trainer) -> None:
        """Forget what was collected."""

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep something of a batch."""
        raise NotImplementedError

    def show(self, trainer: Trainer) -> None:
        """Log what was collected; a collective of all processes."""
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer) -> None:
        """Choose whether to look at this validation."""
        regular = is_due(self._count + 1, self._every)
        self._due = self.fits(trainer) and (regular or (self._every is None and trainer.done))
        if self._due:
            self.start(trainer)

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Look at a batch."""
        if self._due and output is not None:
            self.collect(trainer, batch, output)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show what was collected."""
        self._count += 1
        if self._due:
            self.show(trainer)
            self.start(trainer)  # nothing of it stays in memory

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
        """Forget what was kept."""
        self._kept = None
