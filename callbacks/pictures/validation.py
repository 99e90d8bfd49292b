"""What pictures share: when one is due, and what a validation answered, collected and shown."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from callbacks.support import CallbackError
from trainer.callback import Callback
from trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from trainer.trainer import Trainer


def is_due(count: int, every: int | None) -> bool:
    """Return whether the `count`-th time is due: each `every`-th, or the 1st, 4th, 16th, 64th..."""
    if every is not None:
        return count % every == 0
    return count & (count - 1) == 0 and count.bit_length() % 2 == 1


def check_least(**options: float | None) -> None:
    """Raise CallbackError for options below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise CallbackError(f"{name}={value}: choose at least 1")


def class_names(trainer: Trainer, count: int) -> list[str]:
    """Return the names of the classes, or their numbers if the data have no names."""
    names: Any = None
    if trainer.run_dir is not None:
        with suppress(OSError, RunDirectoryError):
            names = read_json(trainer.run_dir / INFERENCE).get("classes")
    known = isinstance(names, list) and len(names) == count
    return [str(name) for name in names] if known else [str(index) for index in range(count)]


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
    called once after the last batch, if something was kept or other processes may have something.
    """

    kinds: tuple[str, ...] = ()  # of `Task.output_kind` that can be shown
    on_main_only = True

    def __init__(self, count: int = 16, every_n_validations: int | None = None) -> None:
        check_least(count=count, every_n_validations=every_n_validations)
        self.wanted = count
        self._every = every_n_validations
        self._count = 0  # validations so far
        self._due = False
        self.kept: list[Sequence[Any]] = []

    def fits(self, trainer: Trainer) -> bool:
        """Return whether this process collects the outputs of the task."""
        here = trainer.is_main or not self.on_main_only
        return here and trainer.task.output_kind in self.kinds

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep something of a batch in `kept`."""
        raise NotImplementedError

    def show(self, trainer: Trainer) -> None:
        """Log what was kept."""
        raise NotImplementedError

    def gathered(self, trainer: Trainer) -> list[Tensor] | None:
        """Return what all processes kept, joined, on the main process; a collective."""
        own = [torch.cat(parts).cpu() for parts in zip(*self.kept, strict=True)]
        found = [parts for parts in trainer.group.gather(own) if parts]
        if not found or not trainer.is_main:
            return None
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def on_validation_start(self, trainer: Trainer) -> None:
        """Decide whether this validation is shown."""
        regular = is_due(self._count + 1, self._every)
        self._due = self.fits(trainer) and (regular or (self._every is None and trainer.done))
        self.kept = []

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Collect from a batch that is shown."""
        if self._due and output is not None:
            self.collect(trainer, batch, output)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show what was collected."""
        self._count += 1
        if self._due and (self.kept or not self.on_main_only):
            self.show(trainer)
        self.kept = []

    def state_dict(self) -> dict[str, Any]:
        """Return the number of validations."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the number of validations."""
        self._count = int(state["count"])
