"""`dry_run=true`: the plan of a run, from an experiment that is built and tried, not trained."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regimen.callbacks.checkpoint import Checkpoint
from regimen.data.batch import MicroBatch
from regimen.data.errors import DataError
from regimen.data.image_folder import Pictures
from regimen.data.mixture import Mixture
from regimen.data.packing import PackedDocuments
from regimen.data.tokenized import TokenizedSamples
from regimen.scripts.cli.arguments import RunRequest
from regimen.trainer.assembly.accumulation import accumulation_sensitive_parts
from regimen.trainer.assembly.data import device_cache_bytes
from regimen.trainer.assembly.experiment import Experiment
from regimen.trainer.assembly.summary import estimate, render, summarize
from regimen.trainer.components.precision import format_remark
from regimen.trainer.errors import short_message
from regimen.trainer.evaluation import evaluate
from regimen.trainer.files.atomic import write_text
from regimen.trainer.files.layout import WIDTH, escape_controls, format_table, size, wrap_items
from regimen.trainer.inference.predictor import Predictor
from regimen.trainer.lr_schedulers.schedule import curve
from regimen.trainer.optimizers.optimizers import GroupRow
from regimen.trainer.runs.directory import make_folder
from regimen.trainer.task import (
    as_output,
    batch_dependence_warning,
    batches_per_update,
    take_turn,
)
from regimen.trainer.trainer import Trainer

_LEARNING_RATES = 5  # about how many of a group are shown
_CLASSES = 10  # names that are shown


def make_plan(request: RunRequest, experiment: Experiment, folder: Path) -> None:
    """Print the plan and write it to `plan.txt`, the only file of a dry run.

    Raises DataError, after the plan, where the first samples of a split cannot be read, and what
    training would raise.
    """
    trainer = experiment.trainer
    config = experiment.config
    errors = list[DataError]()
    first, notes = _try_out(experiment, errors)
    summary = summarize(
        trainer.model,
        first.batch if first else None,
        call=lambda model, batch: _loss(trainer.task, model, batch),
        autocast=trainer.precision.autocast,
        samples=first.batch_slice.count if first else None,
    )
    notes += _prediction_problems(trainer, first)
    largest, updates = _updates(experiment)
    optimizers = [optimizer for _, optimizer in trainer.optimizers.items()]
    memory = estimate(trainer.model, summary, optimizers, largest, trainer.strategy.mesh.shards)
    memory["data"] = device_cache_bytes(config, experiment.data.sets)
    notes += _notes(experiment, memory)

    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    sections = {
        f"Plan of {config.name}": _choices(request, experiment, width),
        "Data": _data_table(experiment.data.sets, experiment.data.describe(), width),
        "Model": [render(summary, width)],
        "Optimizer": groups_table(trainer.optimizers.table(), width),
        "Learning rate": _learning_rate_table(trainer, width),
        "Updates": updates,
        "Memory on one device": _memory(memory, largest),
        "Callbacks": [f"{n}: {type(c).__name__}" for n, c in trainer.callbacks.items()],
        "Files": [f"a run would write to {folder}"],
        "Notes": notes,
    }
    lines = []
    for title, body in sections.items():
        if body:
            lines += [f"{title} ".ljust(width, "─"), *map(escape_controls, body), ""]
    text = "\n".join(lines)
    print(text)
    make_folder(folder)
    write_text(folder / "plan.txt", text)
    if errors:
        raise errors[0]


def _try_out(
    experiment: Experiment, errors: list[DataError]
) -> tuple[MicroBatch | None, list[str]]:
    """Train on a micro-batch without a step, and evaluate a batch of each other split.

    Returns the micro-batch, None if it cannot be read, and notes for the plan. Samples that cannot
    be read are added to `errors`.
    """
    trainer = experiment.trainer
    first = None
    try:
        first = next(trainer.draw(0))[0]
        trainer.training_model.train()
        trainer.updater.dry_run_backward([first])
    except DataError as error:
        errors.append(error)
    finally:
        trainer.train_loader.close()
    notes = list[str]()
    if first is None:
        return None, notes
    for split, loader in (*trainer.val_loaders.items(), *experiment.test_loaders.items()):
        try:
            metrics = evaluate(trainer.components, loader, split, 1, 0, trainer.hooks)
        except DataError as error:
            errors.append(error)
            continue
        finally:
            loader.close()
        declared = [f"{split}/{name}" for name in trainer.task.metric_names()]
        missing = [name for name in declared if name not in metrics]
        if missing and metrics:  # without any label there are none
            notes.append(
                f"the task declares {', '.join(missing)}, and its evaluation_step does not "
                "return it"
            )
    return first, notes


def _prediction_problems(trainer: Trainer, first: MicroBatch | None) -> Iterator[str]:
    """Say why `predict` could not use the model, which else shows only once a run has ended."""
    if first is None:
        return
    predictor = Predictor(trainer.components)
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
        return as_output(take_turn(task, model, batch, 0), task, "turn_step").loss
    return as_output(task.training_step(model, batch), task, "training_step").loss


def _choices(request: RunRequest, experiment: Experiment, width: int) -> list[str]:
    """Return the lines on the groups' choices, the main settings and the overrides."""
    config = experiment.config
    strategy = experiment.trainer.strategy
    choices = [f"{group}={name}" for group, name in request.choices.items() if name is not None]
    devices = "1 device" if strategy.devices == 1 else f"{strategy.devices} devices"
    settings = [
        f"seed={config.seed}",
        f"device={strategy.device}",
        f"strategy={strategy.name} ({devices})",
        f"precision={experiment.trainer.precision.name}",
        f"task={config.task['_target_']}",
    ]
    lines = wrap_items(choices, width, "  ") + wrap_items(settings, width, "  ")
    if len(strategy.mesh.sizes()) > 1:
        lines.append(str(strategy.mesh))
    if request.overrides:
        lines.append(f"overrides: {' '.join(request.overrides)}")
    return lines


def _data_table(
    sets: Mapping[str, Any], facts: Sequence[Mapping[str, Any]], width: int
) -> list[str]:
    fingerprints = {entry["split"]: entry["fingerprint"] for entry in facts}
    rows = [["split", "data set", "samples", "fingerprint", "classes"]]
    for split, dataset in sets.items():
        if dataset is None:
            continue
        count = f"{len(dataset):,}" if hasattr(dataset, "__len__") else "a stream"
        classes = _class_names(dataset)
        rows.append([split, type(dataset).__name__, count, fingerprints[split], classes])
    lines = format_table(rows, width, right=("samples",))
    train = sets["train"]
    if isinstance(train, Mixture):
        lines.append(f"an epoch of train: {train.explain()}")
    return lines


def _class_names(dataset: Any) -> str:
    """Return the number of classes and the first names; `-` if there are none."""
    classes = getattr(dataset, "classes", None)
    names = [] if classes is None else list(map(str, classes))
    if not names:
        return "-"
    more = ", ..." if len(names) > _CLASSES else ""
    return f"{len(names)}: {', '.join(names[:_CLASSES])}{more}"


def groups_table(rows: Sequence[GroupRow], width: int) -> list[str]:
    """Return the parameter groups as a table."""
    names = ["group", "optimizer", "tensors", "parameters", "lr", "weight decay"]
    cells = [names]
    for row in rows:
        cells.append(
            [
                row.group,
                row.optimizer,
                f"{row.tensors:,}",
                f"{row.parameters:,}",
                _short_number(row.lr),
                _short_number(row.weight_decay),
            ]
        )
    return format_table(cells, width, last=2, right=names[2:])


def _short_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _learning_rate_table(trainer: Trainer, width: int) -> list[str]:
    """Return each group's learning rates, below the number of updates before them."""
    total = trainer.total_steps
    if not total:
        return []
    curves = curve(trainer.lr_schedule, trainer.optimizers, total, _LEARNING_RATES)
    if not curves:
        return []
    rows = [[name, *(f"{lr:.3g}" for _, lr in points)] for name, points in curves.items()]
    steps = [f"{step:,}" for step, _ in next(iter(curves.values()))]
    return format_table([["updates", *steps], *rows], width, right=steps)


def _memory(memory: Mapping[str, int | None], samples: int) -> list[str]:
    """Return the estimate by part; a part of unknown size is None."""
    rows = [["part", "size"]]
    rows += [[part, size(count)] for part, count in memory.items()]
    total = size(sum(count or 0 for count in memory.values()))
    rows.append(["estimate", f"at least {total}" if None in memory.values() else total])
    return [
        *format_table(rows, 80, right=("size",)),
        f"activations of {samples} samples at a time; the framework needs additional memory",
    ]


def _notes(experiment: Experiment, memory: Mapping[str, int | None]) -> Iterator[str]:
    trainer = experiment.trainer
    strategy = trainer.strategy
    explanation = strategy.explain()
    if explanation:
        yield explanation
    yield from _format_notes(experiment)
    yield from trainer.lr_schedule.remarks(trainer.total_steps, trainer.components.epochs)
    if not trainer.val_loaders:
        yield "no validation split: no metric is monitored, use the last checkpoint"
    sets = experiment.data.sets
    if all(sets.get(stage) is None for stage in experiment.config.data.tests):
        yield "no test split: the run ends with its validation metrics"
    for split, dataset in sets.items():
        if isinstance(dataset, Pictures):
            for remark in dataset.explain_depth():
                yield f"data.{split}: {remark}"
        if isinstance(dataset, PackedDocuments | TokenizedSamples):
            for remark in dataset.explain():
                yield f"data.{split}: {remark}"
    steps = experiment.config.trainer.micro_batches
    warning = batch_dependence_warning(
        trainer.task, trainer.model, steps, strategy.data_parallel_size
    )
    if warning:
        yield warning
    sensitive = accumulation_sensitive_parts(trainer) if steps > 1 else []
    if sensitive:
        yield f"{steps} micro-batches: {', '.join(sensitive)} follow the split of an update"
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


def _format_notes(experiment: Experiment) -> Iterator[str]:
    """Say which number formats of the configuration are slow on this device."""
    options = experiment.config.trainer
    mixed_precision = experiment.config.strategy.get("mixed_precision")
    formats: dict[str, str] = {"trainer.precision": options.precision}
    if options.tf32:
        formats["trainer.tf32"] = "tf32"
    if mixed_precision is not None:
        formats["strategy.mixed_precision"] = mixed_precision
    for key, name in formats.items():
        remark = format_remark(key, name, experiment.trainer.strategy.device)
        if remark:
            yield remark


def _updates(experiment: Experiment) -> tuple[int, list[str]]:
    """Return the samples of the largest micro-batch, and when training ends and how it splits."""
    trainer = experiment.trainer
    options = experiment.config.trainer
    loader_options = experiment.config.loader
    limits = []
    for name in ("max_epochs", "max_steps", "max_time"):
        value = getattr(options, name)
        if value is not None:
            limits.append(f"trainer.{name}={value}")
    steps = trainer.steps_per_epoch
    if steps is not None:
        limits.append(f"{steps:,} updates an epoch")
    total = trainer.total_steps
    limits.append("no limit but its time" if total is None else f"{total:,} in all")

    # A sampler may draw more or fewer than there are.
    samples = trainer.train_loader.sampler.samples
    batches = batches_per_update(trainer.task)
    if samples is not None and steps is not None and steps * batches < len(trainer.train_loader):
        samples = min(samples, steps * batches * loader_options.batch_size)
    largest, lines = batch_split(
        loader_options.batch_size,
        trainer.strategy.data_parallel_size,
        options.micro_batches,
        samples,
        loader_options.drop_last,
        "update" if batches == 1 else "batch",
    )
    if batches > 1:
        turns = ", ".join(trainer.task.turns)
        lines.insert(0, f"{batches} batches an update, one for each turn: {turns}")
    return largest, [", ".join(limits), *lines]


def batch_split(
    batch_size: int,
    devices: int,
    micro_batches: int,
    samples: int | None,
    drop_last: bool,
    unit: str = "update",
) -> tuple[int, list[str]]:
    """Say how the samples of an update are split, and what happens to the last ones of an epoch.

    `samples`: of the training set, None for a stream. `unit`: what has batch_size samples, a batch
    where an update has several. Returns the size of the largest micro-batch on one device, and the
    lines.
    """
    largest = math.ceil(min(batch_size, samples or batch_size) / (devices * micro_batches))
    if samples is not None and samples < batch_size:
        split = split_in_words(samples, devices, micro_batches)
        return largest, [f"{split} (loader.batch_size={batch_size} exceeds the samples)"]
    lines = [split_in_words(batch_size, devices, micro_batches)]
    rest = (samples or 0) % batch_size
    if rest and drop_last:
        lines.append(f"the last {rest} samples of each epoch's order are dropped")
    elif rest:
        split = split_in_words(rest, devices, micro_batches)
        lines.append(f"the last {unit} of an epoch: {split}")
    return largest, lines


def split_in_words(samples: int, devices: int, micro_batches: int) -> str:
    """Return `128 = 2 devices x 4 micro-batches x 16`; of an uneven number the sizes, `15 or 16`.

    Samples are split into devices x micro-batches slices whose sizes differ by at most one;
    micro-batches without a sample are skipped.
    """
    micro_batches = min(micro_batches, math.ceil(samples / devices))
    smallest, rest = divmod(samples, devices * micro_batches)
    sizes = f"{smallest} or {smallest + 1}" if rest else f"{smallest}"
    device_word = "device" if devices == 1 else "devices"
    batch_word = "micro-batch" if micro_batches == 1 else "micro-batches"
    return f"{samples} = {devices} {device_word} x {micro_batches} {batch_word} x {sizes}"
