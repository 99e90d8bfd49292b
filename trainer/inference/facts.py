"""`inference.json`: the facts about a run's data that its use without them needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Config
from data.batch import inputs_of
from data.keys import preserved_rng
from data.transforms import Pipeline
from trainer.assembly.data import Data
from trainer.assembly.parts import with_classes
from trainer.files.atomic import write_json
from trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from trainer.task import Task


@dataclass(frozen=True, slots=True)
class InferenceFacts:
    """The inputs and outputs of a model, as plain values."""

    classes: list[str] | None  # names, by class number
    num_classes: int | None
    inputs: dict[str, Any]  # of the transforms: kind "picture" (channels, size), "table", "array"
    outputs: dict[str, Any]  # `Task.output_kind`, the threshold of labels, the scale of values
    transforms: dict[str, Any]  # those of evaluation, as in the configuration
    model: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write `inference.json` into a run's folder, whole or not at all."""
        write_json(folder / INFERENCE, asdict(self))


def facts_of(config: Config, data: Data, task: Task) -> InferenceFacts:
    """Return the facts of a run whose data are open."""
    known = [data.sets[s] for s in ("val", "test", "train") if data.sets.get(s) is not None]
    classes = next((c for s in known if (c := getattr(s, "classes", None))), None)
    outputs: dict[str, Any] = {"kind": task.output_kind}
    if (threshold := getattr(task, "threshold", None)) is not None:
        outputs["threshold"] = threshold
    if (scale := getattr(known[0], "target_scale", None)) is not None:
        outputs["scale"] = list(scale)  # mean and deviation of the training targets
    return InferenceFacts(
        classes=[str(name) for name in classes] if classes else None,
        num_classes=data.num_classes,
        inputs=_input_form(known[0]),
        outputs=outputs,
        transforms=dict(config.transforms.eval),
        model=with_classes(config.model, data.num_classes),
    )


def read_facts(folder: Path) -> InferenceFacts:
    """Read a run's `inference.json`. Raises RunDirectoryError."""
    path = folder / INFERENCE
    found = read_json(path)
    if not found:
        raise RunDirectoryError(
            f"{path} is missing, which training writes when it begins: resume=auto writes it again"
        )
    try:
        return InferenceFacts(**{field.name: found[field.name] for field in fields(InferenceFacts)})
    except KeyError as error:
        raise RunDirectoryError(
            f"{path} is damaged, or of another version: it has no {error}"
        ) from error


def _input_form(dataset: Any) -> dict[str, Any]:
    """Return the form of samples before the transforms: as declared, or as the samples show."""
    if callable(told := getattr(dataset, "input_form", None)):
        return dict(told())
    if not isinstance(pipeline := getattr(dataset, "transform", None), Pipeline):
        return {"kind": "array"}
    kept = pipeline.steps, pipeline.deferred
    pipeline.steps, pipeline.deferred = {}, {}
    try:
        with preserved_rng():
            samples = [inputs_of(dataset[number]) for number in {0, len(dataset) - 1}]
    except Exception:  # the user's own data set, which may do anything with what it transforms
        return {"kind": "array"}
    finally:
        pipeline.steps, pipeline.deferred = kept
    forms = [form for sample in samples if (form := _picture_form(sample))]
    if len(forms) < len(samples):
        return {"kind": "array"}
    sizes = {form[1:] for form in forms}
    size = list(sizes.pop()) if len(sizes) == 1 else None
    return {"kind": "picture", "channels": max(form[0] for form in forms), "size": size}


def _picture_form(value: Any) -> tuple[int, int, int] | None:
    """Return channels, height and width of a Pillow image or a uint8 tensor [C, H, W]."""
    if hasattr(value, "convert"):
        return (1 if value.mode in ("1", "L") else 3, value.height, value.width)
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 3:
        return (len(value), *value.shape[1:]) if len(value) in (1, 3) else None
    return None
