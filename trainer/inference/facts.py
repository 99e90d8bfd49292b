"""`inference.json`: the facts about a run's data that its use without them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Config
from data.errors import DataError
from trainer.build.data import Data, build_pipeline
from trainer.build.nodes import with_classes
from trainer.files.atomic import write_json
from trainer.runs import manifest
from trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from trainer.task import Task

FORMAT_VERSION = 1
_ANY_SIZE = (256, 256)  # of pictures that the transforms bring to one size


@dataclass(frozen=True, slots=True)
class InferenceFacts:
    """The inputs and outputs of a model, as plain values."""

    classes: list[str] | None  # names, by class number
    num_classes: int | None
    inputs: dict[str, Any]  # of the transforms: kind "picture" (channels, size), "table", "array"
    model_inputs: dict[str, Any] | None  # of the network: shape and type of one sample
    outputs: dict[str, Any]  # `Task.output_kind`, the threshold of labels, the scale of values
    transforms: dict[str, Any]  # those of evaluation, as in the configuration
    model: dict[str, Any]
    task: dict[str, Any]
    precision: str
    channels_last: bool
    versions: dict[str, str]
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write `inference.json` into a run's folder, whole or not at all."""
        write_json(folder / INFERENCE, asdict(self))


def facts_of(config: Config, data: Data, task: Task) -> InferenceFacts:
    """Return the facts of a run whose data are open."""
    known = [data.sets[s] for s in ("val", "test", "train") if data.sets.get(s) is not None]
    classes = next((list(c) for s in known if (c := getattr(s, "classes", None))), None)
    inputs = input_form(known[0])
    outputs: dict[str, Any] = {"kind": task.output_kind}
    if (threshold := getattr(task, "threshold", None)) is not None:
        outputs["threshold"] = threshold
    if (scale := getattr(known[0], "target_scale", None)) is not None:
        outputs["scale"] = list(scale)  # mean and deviation of the training targets
    return InferenceFacts(
        classes=[str(name) for name in classes] if classes else None,
        num_classes=data.num_classes,
        inputs=inputs,
        model_inputs=_transformed_form(config, inputs),
        outputs=outputs,
        transforms=dict(config.transforms.eval),
        model=with_classes(config.model, data.num_classes),
        task=with_classes(config.task, data.num_classes),
        precision=config.trainer.precision,
        channels_last=config.trainer.channels_last,
        versions=manifest.versions(),
    )


def read_facts(folder: Path) -> InferenceFacts | None:
    """Read a run's `inference.json`; None for a run of an older version.

    Raises RunDirectoryError for an unknown or damaged file.
    """
    found = read_json(folder / INFERENCE)
    if not found:
        return None
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise RunDirectoryError(
            f"{folder / INFERENCE} has format_version {version!r}, but this version of "
            f"Regimen reads {FORMAT_VERSION}: use the version that made the run"
        )
    try:
        return InferenceFacts(**found)
    except TypeError as error:
        raise RunDirectoryError(f"{folder / INFERENCE} is damaged: {error}") from error


def input_form(dataset: Any) -> dict[str, Any]:
    """Return the form of samples before the transforms, if the data set declares it."""
    told = getattr(dataset, "input_form", None)
    return dict(told()) if callable(told) else {"kind": "array"}


def _transformed_form(config: Config, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return shape and type of a picture after the transforms of evaluation; None if unknown."""
    if inputs["kind"] != "picture":
        return None
    picture = torch.zeros(inputs["channels"], *(inputs["size"] or _ANY_SIZE), dtype=torch.uint8)
    try:
        return tensor_form(build_pipeline(config, "eval")(picture))
    except DataError:  # a transform of the user that does not accept such a picture
        return None


def tensor_form(value: Any) -> dict[str, Any] | None:
    """Return a tensor's shape and dtype, or those of each tensor of a mapping."""
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        forms = {str(key): tensor_form(part) for key, part in value.items()}
        return forms if all(forms.values()) else None
    return None
