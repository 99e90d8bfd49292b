"""`dry_run=true`: collect the plan from a built experiment."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.checkpoint import Checkpoint
from data.errors import DataError
from scripts.plan.batch_split import BatchSplit
from scripts.plan.drawing import DataRow, Plan, render
from scripts.plan.trial import first_micro_batch, try_out
from trainer.build.caches import kept_bytes
from trainer.files.atomic import write_text
from trainer.files.layout import takes_colour
from trainer.lr_schedulers.schedule import curve
from trainer.runs.directory import make_folder
from trainer.summary.memory import MemoryEstimate, estimate
from trainer.summary.model import summarize
from trainer.summary.text import size
from trainer.task import as_output, coupling_remark

if TYPE_CHECKING:
    from scripts.cli.request import Request
    from trainer.build.experiment import Experiment


def make_plan(request: Request, experiment: Experiment, folder: Path) -> None:
    """Print the plan and write it to `plan.txt`, the only file of a dry run."""
    plan = _plan(request, experiment, folder)
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    print(render(plan, width=width, colour=takes_colour(sys.stdout)))
    make_folder(folder)
    write_text(folder / "plan.txt", render(plan, width=100))


def _plan(request: Request, experiment: Experiment, folder: Path) -> Plan:
    config, trainer = experiment.config, experiment.trainer
    strategy, options = trainer.strategy, config.trainer
    split = BatchSplit(
        config.loader.batch_size,
        strategy.devices,
        options.gradient_accumulation_steps,
        _length(experiment.data.sets["train"]),
        config.loader.drop_last,
    )
    first = first_micro_batch(trainer)
    summary = summarize(
        trainer.model,
        None if isinstance(first, DataError) else first.batch,
        call=lambda model, batch: _loss(trainer.task, model, batch),
        autocast=trainer.precision.autocast,
    )
    untried = list(try_out(experiment, first))
    total, steps = trainer.total_steps, trainer.steps_per_epoch
    curves = curve(trainer.lr_schedule, trainer.optimizers, total) if total else {}
    optimizers = [o for _, o in trainer.optimizers.items()]
    memory = replace(
        estimate(summary, optimizers, split.largest),
        data=kept_bytes(config, experiment.data.sets),
    )
    return Plan(
        name=config.name,
        picks=request.choices,
        settings=_settings(experiment),
        overrides=request.overrides,
        data=list(_data_rows(experiment)),
        model=summary,
        groups=trainer.optimizers.table(),
        curves={name: [lr for _, lr in points] for name, points in curves.items()},
        split=split,
        updates_per_epoch=steps,
        total_steps=total,
        horizon=_horizon(options),
        memory=memory,
        callbacks={name: type(c).__name__ for name, c in trainer.callbacks.items()},
        run_dir=str(folder),
        notes=[*untried, *_notes(experiment, memory)],
    )


def _settings(experiment: Experiment) -> dict[str, str]:
    config, strategy = experiment.config, experiment.trainer.strategy
    return {
        "seed": str(config.seed),
        "device": str(strategy.device),
        "strategy": f"{strategy.name} ({strategy.devices} devices)",
        "precision": experiment.trainer.precision.name,
        "task": str(config.task["_target_"]),
    }


def _horizon(options: Any) -> str:
    limits = {name: getattr(options, name) for name in ("max_epochs", "max_steps", "max_time")}
    return ", ".join(f"trainer.{name}={v}" for name, v in limits.items() if v is not None)


def _loss(task: Any, model: Any, batch: Any) -> Any:
    if batch is None:
        raise DataError("no sample can be read")
    if task.turns:
        return as_output(task.turn_step(model, batch, task.turns[0]), task, "turn_step").loss
    return as_output(task.training_step(model, batch), task, "training_step").loss


def _data_rows(experiment: Experiment) -> Iterator[DataRow]:
    for split, dataset in experiment.data.sets.items():
        if dataset is not None:
            classes = getattr(dataset, "classes", None) or ()
            yield DataRow(split, type(dataset).__name__, _length(dataset), classes)


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _notes(experiment: Experiment, memory: MemoryEstimate) -> Iterator[str]:
    strategy: Any = experiment.trainer.strategy
    explained = strategy.explain() if hasattr(strategy, "explain") else None
    if explained:
        yield explained
    if experiment.data.sets.get("val") is None:
        yield "no validation split: no metric is monitored, use the last checkpoint"
    if experiment.data.sets.get("test") is None:
        yield "no test split: the run ends with its validation metrics"
    options = experiment.trainer.options
    accumulation = options.gradient_accumulation_steps
    if remark := coupling_remark(experiment.trainer.task, accumulation, strategy.devices):
        yield remark
    if experiment.checkpointed:
        yield f"activation checkpointing: {', '.join(experiment.checkpointed)}"
    for callback in experiment.trainer.callbacks.values():
        yield from callback.explain(experiment.trainer)
    callbacks = experiment.trainer.callbacks.items()
    for name in (n for n, c in callbacks if isinstance(c, Checkpoint) and c.background):
        state = memory.parameters + memory.buffers + (memory.optimizer or 0)
        yield (
            f"checkpoints are written from a copy of {size(state)} in host memory, in addition to "
            f"averages of weights (callbacks.{name}.background=false: without one)"
        )
