"""The configuration, the overrides and the plan of a run as texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.support.watching import code_block
from trainer.callback import Callback
from trainer.runs.directory import CONFIG, OVERRIDES

if TYPE_CHECKING:
    from trainer.trainer import Trainer

PLAN = "plan.txt"


class Texts(Callback):
    """Log the resolved configuration, the overrides and the plan, as `run/...`, once.

    The plan is that of a dry run in the same directory, or else a short one.
    """

    def __init__(self) -> None:
        self._done = False

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Log the texts after the setup of all callbacks; a resumed run has logged them already."""
        if self._done or trainer.resumed or not trainer.is_main or trainer.run_dir is None:
            return
        self._done = True
        for name, file in (("config", CONFIG), ("overrides", OVERRIDES)):
            if text := _read(trainer.run_dir / file):
                trainer.log_text(f"run/{name}", code_block(text))
        plan = _read(trainer.run_dir / PLAN) or "\n".join(short_plan(trainer))
        trainer.log_text("run/plan", code_block(plan))


def short_plan(trainer: Trainer) -> Iterator[str]:
    """Yield the length of a run, its devices, its precision and its parameter groups."""
    options, strategy = trainer.options, trainer.strategy
    yield f"epochs      {options.max_epochs or '-'}, updates {trainer.total_steps or 'unknown'}"
    yield f"an epoch    {trainer.steps_per_epoch or 'unknown number of'} updates"
    yield f"devices     {strategy.devices} x {strategy.device.type}, strategy {strategy.name}"
    yield f"precision   {trainer.precision.name}"
    parameters = list(trainer.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    yield f"parameters  {sum(p.numel() for p in parameters):,}, trained {trained:,}"
    for name, rate in trainer.learning_rates().items():
        yield f"group       {name}: first learning rate {rate:g}"
    for callback in trainer.callbacks.values():
        yield from (f"{callback.name}: {line}" for line in callback.explain(trainer))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
