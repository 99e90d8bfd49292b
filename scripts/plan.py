"""`dry_run=true`: the plan of a run, from an experiment that is built and tried, not trained."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.checkpoint import Checkpoint
from data.errors import DataError
from trainer.assembly.data import kept_bytes
from trainer.evaluation import Evaluator
from trainer.files.atomic import write_text
from trainer.files.layout import aligned, takes_colour
from trainer.lr_schedulers.schedule import curve
from trainer.optimizers.optimizers import GroupRow
from trainer.runs.directory import make_folder
from trainer.summary.model import (
    MemoryEstimate,
    Summary,
    estimate,
    fitting_table,
    summarize,
    totals,
)
from trainer.summary.text import natural_width, size, table, to_text
from trainer.task import as_output, coupling_remark

if TYPE_CHECKING:
    from rich.console import RenderableType

    from data.batch import MicroBatch
    from scripts.cli.request import Request
    from trainer.assembly.experiment import Experiment

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CLASSES = 10  # names that are shown


def make_plan(request: Request, experiment: Experiment, folder: Path) -> None:
    """Print the plan and write it to `plan.txt`, the only file of a dry run.

    Raises DataError, after the plan, where the first samples of a split cannot be read, and what
    training would raise.
    """
    trainer, config = experiment.trainer, experiment.config
    unread: list[DataError] = []
    first = _first_micro_batch(trainer, unread)
    summary = summarize(
        trainer.model,
        None if first is None else first.batch,
        call=lambda model, batch: _loss(trainer.task, model, batch),
        autocast=trainer.precision.autocast,
    )
    notes = list(_try_out(experiment, first, unread))
    split = BatchSplit(
        config.loader.batch_size,
        trainer.strategy.devices,
        config.trainer.gradient_accumulation_steps,
        _length(experiment.data.sets["train"]),
        config.loader.drop_last,
    )
    optimizers = [optimizer for _, optimizer in trainer.optimizers.items()]
    memory = replace(
        estimate(summary, optimizers, split.largest),
        data=kept_bytes(config, experiment.data.sets),
    )
    notes += _notes(experiment, memory)

    def render(width: int, colour: bool = False) -> str:
        sections = dict(_sections(request, experiment, summary, split, memory, width))
        sections |= {"Files": [f"a run would write to {folder}"], "Notes": [*notes]}
        drawn = [part for title, body in sections.items() for part in _section(title, body)]
        return to_text(*drawn, width=width, colour=colour)

    columns = min(shutil.get_terminal_size((100, 24)).columns, 120)
    print(render(columns, takes_colour(sys.stdout)))
    make_folder(folder)
    write_text(folder / "plan.txt", render(100))
    if unread:
        raise unread[0]


def _first_micro_batch(trainer: Any, unread: list[DataError]) -> MicroBatch | None:
    try:
        found: MicroBatch = next(trainer.draw(0))[0]
    except DataError as error:
        unread.append(error)
        return None
    finally:
        trainer.train_loader.close()
    return found


def _try_out(
    experiment: Experiment, first: MicroBatch | None, unread: list[DataError]
) -> Iterator[str]:
    # A micro-batch is trained on without a step, and one batch of each other split evaluated.
    trainer = experiment.trainer
    if first is None:
        return
    trainer.wrapped.train()
    trainer.updater.try_out([first])
    declared = trainer.task.metric_names()
    for split, loader in (("val", trainer.val_loader), ("test", experiment.test_loader)):
        if loader is None:
            continue
        try:
            found = Evaluator(trainer, trainer.waiting).run(loader, split, nullcontext(), 1, 0)
        except DataError as error:
            unread.append(error)
            continue
        finally:
            loader.close()
        if missing := [name for n in declared if (name := f"{split}/{n}") not in found]:
            named = ", ".join(missing)
            yield f"the task declares {named}, and its evaluation_step does not return it"


def _loss(task: Any, model: Any, batch: Any) -> Any:
    if batch is None:
        raise DataError("no sample can be read")
    if task.turns:
        return as_output(task.turn_step(model, batch, task.turns[0]), task, "turn_step").loss
    return as_output(task.training_step(model, batch), task, "training_step").loss


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _section(title: str, parts: Sequence[RenderableType]) -> Iterator[RenderableType]:
    if parts:
        from rich.rule import Rule  # imported here because the import of rich takes 0.1 s
        from rich.text import Text

        yield Rule(Text(title, style="bold cyan"), align="left", style="dim")
        yield from parts
        yield ""


def _sections(
    request: Request,
    experiment: Experiment,
    summary: Summary,
    split: BatchSplit,
    memory: MemoryEstimate,
    width: int,
) -> Iterator[tuple[str, list[RenderableType]]]:
    trainer, config = experiment.trainer, experiment.config
    strategy, total = trainer.strategy, trainer.total_steps
    settings = {
        "seed": config.seed,
        "device": strategy.device,
        "strategy": f"{strategy.name} ({strategy.devices} devices)",
        "precision": trainer.precision.name,
        "task": config.task["_target_"],
    }
    picks = {group: pick for group, pick in request.choices.items() if pick is not None}
    pairs: list[RenderableType] = [
        "  ".join(f"{k}={v}" for k, v in found.items()) for found in (picks, settings)
    ]
    overrides = [f"overrides: {' '.join(request.overrides)}"] if request.overrides else []
    yield f"Plan of {config.name}", [*pairs, *overrides]
    yield "Data", [_data_table(experiment.data.sets)]
    yield "Model", [fitting_table(summary, width), totals(summary)]
    yield "Optimizer", [groups_table(trainer.optimizers.table(), width)]
    points = curve(trainer.lr_schedule, trainer.optimizers, total) if total else {}
    rates = {name: [lr for _, lr in found] for name, found in points.items()}
    yield "Learning rate", list(curve_lines(rates, total, min(64, width - 16)))
    limits = {n: getattr(config.trainer, n) for n in ("max_epochs", "max_steps", "max_time")}
    ends = [f"trainer.{name}={value}" for name, value in limits.items() if value is not None]
    if trainer.steps_per_epoch is not None:
        ends.append(f"{trainer.steps_per_epoch:,} updates an epoch")
    ends.append("no limit but its time" if total is None else f"{total:,} in all")
    yield "Updates", [", ".join(ends), *split.lines()]
    yield "Memory on one device", [_memory_table(memory), *_memory_notes(memory, split.largest)]
    callbacks = trainer.callbacks.items()
    yield "Callbacks", [f"{name}: {type(callback).__name__}" for name, callback in callbacks]


def _data_table(sets: Mapping[str, Any]) -> RenderableType:
    rows = []
    for split, dataset in sets.items():
        if dataset is not None:
            samples, names = _length(dataset), [*map(str, getattr(dataset, "classes", None) or ())]
            more = ", ..." if len(names) > _CLASSES else ""
            classes = f"{len(names)}: {', '.join(names[:_CLASSES])}{more}" if names else "-"
            count = "a stream" if samples is None else f"{samples:,}"
            rows.append((split, type(dataset).__name__, count, classes))
    return table(("split", "data set", "samples", "classes"), rows, right=("samples",))


def groups_table(rows: Sequence[GroupRow], width: int) -> RenderableType:
    """Return the parameter groups as a table; too wide a one as lines."""
    columns = ["group", "optimizer", "tensors", "parameters", "lr", "weight decay"]
    cells = []
    for row in rows:
        numbers = ("-" if v is None else f"{v:.4g}" for v in (row.lr, row.weight_decay))
        cells.append(
            [row.group, row.optimizer, f"{row.tensors:,}", f"{row.parameters:,}", *numbers]
        )
    whole = table(columns, cells, right=columns[2:])
    if natural_width(whole) <= width:
        return whole
    return "\n".join(aligned([columns, *cells], width, last=2))


def _memory_table(memory: MemoryEstimate) -> RenderableType:
    parts = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        **({} if memory.data == 0 else {"data": memory.data}),
    }
    total = size(memory.total) if memory.complete else f"more than {size(memory.total)}"
    rows = [*((name, size(value)) for name, value in parts.items()), ("estimate", total)]
    return table(("part", "size"), rows, right=("size",))


def _memory_notes(memory: MemoryEstimate, samples: int) -> Iterator[str]:
    others = ", its workspace and the data" if memory.data == 0 else " and its workspace"
    yield (
        f"activations of {samples} samples at a time; the framework{others} need additional memory"
    )
    if memory.data is None:
        yield "data.cache=device: how much the decoded images take shows when they are decoded"


def _notes(experiment: Experiment, memory: MemoryEstimate) -> Iterator[str]:
    trainer = experiment.trainer
    strategy: Any = trainer.strategy
    if hasattr(strategy, "explain") and (explained := strategy.explain()):
        yield explained
    if experiment.data.sets.get("val") is None:
        yield "no validation split: no metric is monitored, use the last checkpoint"
    if experiment.data.sets.get("test") is None:
        yield "no test split: the run ends with its validation metrics"
    accumulation = experiment.config.trainer.gradient_accumulation_steps
    if remark := coupling_remark(trainer.task, accumulation, strategy.devices):
        yield remark
    if experiment.checkpointed:
        yield f"activation checkpointing: {', '.join(experiment.checkpointed)}"
    for name, callback in trainer.callbacks.items():
        yield from callback.explain(trainer)
        if isinstance(callback, Checkpoint) and callback.background:
            state = memory.parameters + memory.buffers + (memory.optimizer or 0)
            yield (
                f"checkpoints are written from a copy of {size(state)} in host memory, in addition "
                f"to averages of weights (callbacks.{name}.background=false: without one)"
            )


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How the samples of an update are split over devices and micro-batches.

    `samples` is the size of the training set, None for a stream.
    """

    batch_size: int
    devices: int
    micro_batches: int
    samples: int | None = None
    drop_last: bool = False

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch on one device."""
        count = self.batch_size if self.samples is None else min(self.batch_size, self.samples)
        return -(-count // (self.devices * self.micro_batches))

    def lines(self) -> list[str]:
        """Describe the split of an update, and what happens to the last samples of an epoch."""
        if self.samples is not None and self.samples < self.batch_size:
            few = self.describe(self.samples)
            return [f"{few} (loader.batch_size={self.batch_size} exceeds the samples)"]
        lines = [self.describe(self.batch_size)]
        if rest := 0 if self.samples is None else self.samples % self.batch_size:
            dropped = f"the last {rest} samples of each epoch's order are dropped"
            last = f"the last update of an epoch: {self.describe(rest)}"
            lines.append(dropped if self.drop_last else last)
        return lines

    def describe(self, samples: int) -> str:
        """Return `128 = 2 devices x 4 micro-batches x 16`, or the split of an uneven number.

        Samples are split into devices x micro-batches pieces whose sizes differ by at most one, the
        larger first; micro-batches without a sample are skipped.
        """
        micro_batches = min(self.micro_batches, -(-samples // self.devices))
        pieces = self.devices * micro_batches
        whole, more = divmod(samples, pieces)
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        parts = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        grid = f"{samples} = {devices} x {parts}"
        if not more:
            return f"{grid} x {whole}"
        if not whole:
            return f"{grid}: {more} with 1 sample, {pieces - more} with none (weight 0)"
        return f"{grid}: {more} of {whole + 1} and {pieces - more} of {whole} samples"


def curve_lines(
    curves: Mapping[str, Sequence[float]], length: int | None = None, width: int = 64
) -> Iterator[str]:
    """Draw each learning-rate curve over `length` updates, `width` characters wide.

    Groups whose curves differ only by a factor share a plot.
    """
    shapes: dict[tuple[float, ...], list[str]] = {}
    for name, values in curves.items():
        top = max(values, default=0.0)
        shape = tuple(round(v / top, 6) for v in values) if top > 0 else tuple(values)
        shapes.setdefault(shape, []).append(name)
    for names in shapes.values():
        captions: dict[str, list[str]] = {}
        for name in names:
            captions.setdefault(_caption(curves[name]), []).append(name)
        yield from (f"{', '.join(alike)}: {caption}" for caption, alike in captions.items())
        first = curves[names[0]]
        if first and min(first) < max(first):
            yield from plot(first, length, width)


def _caption(values: Sequence[float]) -> str:
    if not values:
        return "no updates"
    if min(values) == max(values):
        return f"constant at {values[0]:.4g}"
    return f"{values[0]:.3g} at first, at most {max(values):.3g}, {values[-1]:.3g} at last"


def plot(
    values: Sequence[float], length: int | None = None, width: int = 64, height: int = 5
) -> list[str]:
    """Plot `values` as an area from zero to their maximum, over `length` updates.

    The values are evenly spaced; without a length there is one value for each update.
    """
    length = len(values) if length is None else length
    top = max(values)
    if top <= 0:
        return [f"0 over {length:,} updates"]
    last = len(values) - 1
    columns = [value for value in values for _ in range(max(1, width // len(values)))]
    if len(values) > width:  # the first and the last are among them
        columns = [values[round(column * last / (width - 1))] for column in range(width)]
    # In eighths of a line; values above zero get at least one.
    filled = [max(round(v / top * height * 8), v > 0) for v in columns]
    lines = []
    for line in reversed(range(height)):
        blocks = "".join(_BLOCKS[min(max(f - 8 * line, 0), 8)] for f in filled)
        lines.append(f"{f'{top:.3g}' if line == height - 1 else '':>9} │{blocks}".rstrip())
    lines.append(f"{'0':>9} └{'─' * len(columns)}")
    end = f"{length:,} updates"
    lines.append(f"{'':>11}0{end:>{max(len(columns) - 1, len(end) + 1)}}")
    return lines
