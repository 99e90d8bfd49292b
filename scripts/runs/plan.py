"""`dry_run=true`: the plan of a run, from an experiment that is built and tried, not trained."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regimen.callbacks.checkpoint import Checkpoint
from regimen.data.batch import MicroBatch
from regimen.data.errors import DataError
from regimen.data.image_folder import Pictures
from regimen.data.mixture import Mixture
from regimen.scripts.cli.arguments import Request
from regimen.trainer.assembly.data import kept_bytes
from regimen.trainer.assembly.experiment import Experiment, follows_split
from regimen.trainer.assembly.summary import estimate, render, summarize
from regimen.trainer.errors import short_message
from regimen.trainer.evaluation import evaluate
from regimen.trainer.files.atomic import write_text
from regimen.trainer.files.layout import WIDTH, aligned, packed, size, visible
from regimen.trainer.inference.predictor import Predictor
from regimen.trainer.lr_schedulers.schedule import curve
from regimen.trainer.optimizers.optimizers import GroupRow
from regimen.trainer.runs.directory import make_folder
from regimen.trainer.task import as_output, batch_dependence_warning
from regimen.trainer.trainer import Trainer
from regimen.trainer.update.precision import format_remark

_RATES = 5  # about how many learning rates of a group are shown
_CLASSES = 10  # names that are shown


def make_plan(request: Request, experiment: Experiment, folder: Path) -> None:
    """Print the plan and write it to `plan.txt`, the only file of a dry run.

    Raises DataError, after the plan, where the first samples of a split cannot be read, and what
    training would raise.
    """
    trainer, config, sets = experiment.trainer, experiment.config, experiment.data.sets
    unread = list[DataError]()
    first, notes = _tried(experiment, unread)
    summary = summarize(
        trainer.model,
        first.batch if first else None,
        call=lambda model, batch: _loss(trainer.task, model, batch),
        autocast=trainer.precision.autocast,
        samples=first.batch_slice.count if first else None,
    )
    notes += _asked(trainer, first)
    largest, updates = _updates(experiment)
    optimizers = [optimizer for _, optimizer in trainer.optimizers.items()]
    memory = estimate(trainer.model, summary, optimizers, largest, trainer.strategy.mesh.shards)
    memory["data"] = kept_bytes(config, sets)
    notes += _notes(experiment, memory)
    total, strategy = trainer.total_steps, trainer.strategy
    rates = curve(trainer.lr_schedule, trainer.optimizers, total, _RATES) if total else {}
    settings = [
        f"seed={config.seed}",
        f"device={strategy.device}",
        f"strategy={strategy.name} ({strategy.devices} device{'s' * (strategy.devices > 1)})",
        f"precision={trainer.precision.name}",
        f"task={config.task['_target_']}",
    ]
    picked = [f"{group}={name}" for group, name in request.choices.items() if name is not None]
    mesh = [str(strategy.mesh)] if len(strategy.mesh.sizes()) > 1 else []
    given = [f"overrides: {' '.join(request.overrides)}"] if request.overrides else []

    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    chosen = [*packed(picked, width, "  "), *packed(settings, width, "  ")]
    sections = {
        f"Plan of {config.name}": [*chosen, *mesh, *given],
        "Data": _data_table(sets, experiment.data.describe(), width),
        "Model": [render(summary, width)],
        "Optimizer": groups_table(trainer.optimizers.table(), width),
        "Learning rate": _rate_table(rates, width) if rates else [],
        "Updates": updates,
        "Memory on one device": list(_memory(memory, largest)),
        "Callbacks": [f"{n}: {type(c).__name__}" for n, c in trainer.callbacks.items()],
        "Files": [f"a run would write to {folder}"],
        "Notes": notes,
    }
    lines = []
    for title, body in sections.items():
        if body:
            lines += [f"{title} ".ljust(width, "─"), *map(visible, body), ""]
    text = "\n".join(lines)
    print(text)
    make_folder(folder)
    write_text(folder / "plan.txt", text)
    if unread:
        raise unread[0]


def _tried(experiment: Experiment, unread: list[DataError]) -> tuple[MicroBatch | None, list[str]]:
    """Train on a micro-batch without a step, and evaluate a batch of each other split.

    Returns the micro-batch, None if it cannot be read, and what is to be noted.
    """
    trainer, first, notes = experiment.trainer, None, []
    for split, loader in (
        ("train", trainer.train_loader),
        *trainer.val_loaders.items(),
        *experiment.test_loaders.items(),
    ):
        if loader is None or (split != "train" and first is None):
            continue
        try:
            if split == "train":
                first = next(trainer.draw(0))[0]
                trainer.wrapped.train()
                trainer.updater.dry_run_backward([first])
                continue
            found = evaluate(trainer, loader, split, 1, 0)
        except DataError as error:
            unread.append(error)
            continue
        finally:
            loader.close()
        declared = [f"{split}/{name}" for name in trainer.task.metric_names()]
        if missing := [name for name in declared if name not in found]:
            named = ", ".join(missing)
            notes.append(f"the task declares {named}, and its evaluation_step does not return it")
    return first, notes


def _asked(trainer: Trainer, first: MicroBatch | None) -> Iterator[str]:
    """Say why `predict` could not ask the model, which shows only once a run has ended."""
    if first is None:
        return
    predictor = Predictor(trainer)
    try:
        with torch.inference_mode(), predictor.ready():
            predictor.ask(first.batch, range(first.batch_slice.count))
    except Exception as error:  # of the user's code: the training does not need it
        yield (
            f"predict cannot ask this model ({short_message(error)}): give the task a method "
            "prediction_step(model, batch) that returns the model's output for a batch"
        )


def _loss(task: Any, model: Any, batch: Any) -> Any:
    if batch is None:
        raise DataError("no sample can be read")
    if task.turns:
        return as_output(task.turn_step(model, batch, task.turns[0]), task, "turn_step").loss
    return as_output(task.training_step(model, batch), task, "training_step").loss


def _data_table(
    sets: Mapping[str, Any], facts: Sequence[Mapping[str, Any]], width: int
) -> list[str]:
    fingerprints = {known["split"]: known["fingerprint"] for known in facts}
    rows = [["split", "data set", "samples", "fingerprint", "classes"]]
    for split, dataset in sets.items():
        if dataset is not None:
            known = getattr(dataset, "classes", None)
            names = [] if known is None else [*map(str, known)]
            more = ", ..." if len(names) > _CLASSES else ""
            classes = f"{len(names)}: {', '.join(names[:_CLASSES])}{more}" if names else "-"
            count = f"{len(dataset):,}" if hasattr(dataset, "__len__") else "a stream"
            rows.append([split, type(dataset).__name__, count, fingerprints[split], classes])
    table, train = aligned(rows, width, right=("samples",)), sets["train"]
    mixed = [f"an epoch of train: {train.explain()}"] if isinstance(train, Mixture) else []
    return [*table, *mixed]


def groups_table(rows: Sequence[GroupRow], width: int) -> list[str]:
    """Return the parameter groups as a table."""
    cells = [["group", "optimizer", "tensors", "parameters", "lr", "weight decay"]]
    for row in rows:
        numbers = ("-" if v is None else f"{v:.4g}" for v in (row.lr, row.weight_decay))
        sizes = f"{row.tensors:,}", f"{row.parameters:,}"
        cells.append([row.group, row.optimizer, *sizes, *numbers])
    return aligned(cells, width, last=2, right=cells[0][2:])


def _rate_table(curves: Mapping[str, Sequence[tuple[int, float]]], width: int) -> list[str]:
    """Return each group's learning rates, below the number of updates before them."""
    rows = [[name, *(f"{lr:.3g}" for _, lr in points)] for name, points in curves.items()]
    steps = [f"{step:,}" for step, _ in next(iter(curves.values()))]
    return aligned([["updates", *steps], *rows], width, right=steps)


def _memory(memory: Mapping[str, int | None], samples: int) -> Iterator[str]:
    total = sum(count or 0 for count in memory.values())
    rows = {"part": "size"} | {name: size(count) for name, count in memory.items()}
    rows["estimate"] = "at least " * (None in memory.values()) + size(total)
    yield from aligned([*rows.items()], 80, right=("size",))
    yield f"activations of {samples} samples at a time; the framework needs additional memory"


def _notes(experiment: Experiment, memory: Mapping[str, int | None]) -> Iterator[str]:
    trainer, sets = experiment.trainer, experiment.data.sets
    if explained := trainer.strategy.explain():
        yield explained
    options, strategy = experiment.config.trainer, experiment.config.strategy
    formats: dict[str, str] = {"trainer.precision": options.precision}
    if options.tf32:
        formats["trainer.tf32"] = "tf32"
    if strategy.get("mixed_precision") is not None:
        formats["strategy.mixed_precision"] = strategy["mixed_precision"]
    for key, name in formats.items():
        if remark := format_remark(key, name, trainer.strategy.device):
            yield remark
    if not trainer.val_loaders:
        yield "no validation split: no metric is monitored, use the last checkpoint"
    if all(sets.get(stage) is None for stage in experiment.config.data.tests):
        yield "no test split: the run ends with its validation metrics"
    for split, dataset in sets.items():
        if isinstance(dataset, Pictures):
            yield from (f"data.{split}: {remark}" for remark in dataset.explain_depth())
    accumulation = experiment.config.trainer.micro_batches
    if remark := batch_dependence_warning(
        trainer.task, accumulation, trainer.strategy.data_parallel_size
    ):
        yield remark
    if accumulation > 1 and (coupled := follows_split(trainer)):
        yield f"{accumulation} micro-batches: {', '.join(coupled)} follow the split of an update"
    if experiment.checkpointed:
        yield f"activation checkpointing: {', '.join(experiment.checkpointed)}"
    for name, callback in trainer.callbacks.items():
        yield from callback.explain(trainer)
        if isinstance(callback, Checkpoint) and callback.background:
            state = sum(memory[part] or 0 for part in ("parameters", "buffers", "optimizer state"))
            yield (
                f"checkpoints are written from a copy of {size(state)} in host memory, in addition "
                f"to averages of weights (callbacks.{name}.background=false: without one)"
            )


def _updates(experiment: Experiment) -> tuple[int, list[str]]:
    """Return the samples of the largest micro-batch, and when training ends and how it splits."""
    trainer, config = experiment.trainer, experiment.config
    limits = {n: getattr(config.trainer, n) for n in ("max_epochs", "max_steps", "max_time")}
    ends = [f"trainer.{name}={value}" for name, value in limits.items() if value is not None]
    if trainer.steps_per_epoch is not None:
        ends.append(f"{trainer.steps_per_epoch:,} updates an epoch")
    total = trainer.total_steps
    ends.append("no limit but its time" if total is None else f"{total:,} in all")
    grid = trainer.strategy.data_parallel_size, config.trainer.micro_batches
    samples = trainer.train_loader.sampler.samples  # of the order, which a sampler decides
    steps = trainer.steps_per_epoch
    if samples is not None and steps is not None and steps < len(trainer.train_loader):
        samples = min(samples, steps * config.loader.batch_size)
    largest, lines = batch_split(config.loader.batch_size, *grid, samples, config.loader.drop_last)
    return largest, [", ".join(ends), *lines]


def batch_split(
    batch_size: int, devices: int, micro_batches: int, samples: int | None, drop_last: bool
) -> tuple[int, list[str]]:
    """Say how the samples of an update are split, and what happens to the last ones of an epoch.

    samples: of the training set, None for a stream. Returns the size of the largest micro-batch on
    one device, and the lines.
    """
    words = partial(split_in_words, devices=devices, micro_batches=micro_batches)
    largest = -(-min(batch_size, samples or batch_size) // (devices * micro_batches))
    if samples is not None and samples < batch_size:
        return largest, [f"{words(samples)} (loader.batch_size={batch_size} exceeds the samples)"]
    lines = [words(batch_size)]
    if rest := (samples or 0) % batch_size:
        dropped = f"the last {rest} samples of each epoch's order are dropped"
        lines.append(dropped if drop_last else f"the last update of an epoch: {words(rest)}")
    return largest, lines


def split_in_words(samples: int, devices: int, micro_batches: int) -> str:
    """Return `128 = 2 devices x 4 micro-batches x 16`; of an uneven number the sizes, `15 or 16`.

    Samples are split into devices x micro-batches pieces whose sizes differ by at most one;
    micro-batches without a sample are skipped.
    """
    micro_batches = min(micro_batches, -(-samples // devices))
    each, more = divmod(samples, devices * micro_batches)
    on, of = "s" * (devices > 1), "es" * (micro_batches > 1)
    sizes = f"{each} or {each + 1}" if more else each
    return f"{samples} = {devices} device{on} x {micro_batches} micro-batch{of} x {sizes}"
