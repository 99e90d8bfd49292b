"""The network of a detector that is exported: one picture of a fixed size in, its boxes out."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.trainer.errors import ModelError, short_message
from regimen.trainer.export.formats import Exportable, Facts, save_onnx, silently
from regimen.trainer.task import Task

OUTPUTS = ("boxes", "scores", "labels")
FORMATS = ("onnx", "torchscript", "safetensors")  # torch.export takes no model of torchvision's
_OPSET = 18
_TOLERANCE = 1e-4  # of a box, in shares of the side, and of a score
_PICTURES = 16  # of the run's that a file is verified with, beside a black one
_ABOUT = {
    "boxes": "float32 [n, 4], x1 y1 x2 y2 in pixels of the input, the surest first",
    "scores": "float32 [n]",
    "labels": "int64 [n], numbers of the classes",
}


class BoxNetwork(nn.Module):
    """A detector as its task calls it, for one picture.

    takes_bytes: its input is uint8, and scaled to [0, 1] within.
    """

    def __init__(self, model: nn.Module, task: Task, takes_bytes: bool) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.takes_bytes = takes_bytes
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map a picture [1, C, S, S] to its boxes [n, 4], their scores [n] and labels [n]."""
        if self.takes_bytes:
            x = x.to(torch.float32) / 255
        (answer,) = self.task.prediction_step(self.model, x)
        return tuple(answer[name] for name in OUTPUTS)


def describe_boxes(facts: Facts, samples: Tensor) -> None:
    """Add the inputs and outputs of a detector's file to the facts about it."""
    facts["input"] = {
        "shape": list(samples[:1].shape),
        "dtype": str(samples.dtype).removeprefix("torch."),
        "about": "one picture, scaled until its longer side fits, padded with 0 at the right and "
        "below",
    }
    facts["output"] = "boxes"
    facts["outputs"] = {**facts["outputs"], **_ABOUT}


def write_boxes(graph: Exportable, path: Path) -> None:
    """Write a detector in the format that the facts name. Raises ModelError."""
    name = graph.facts["format"]
    example = graph.samples[:1].clone()
    try:
        with silently(), torch.no_grad():
            if name == "onnx":
                _write_onnx(graph, example, path)
            else:
                traced = torch.jit.trace(graph.network, (example,), strict=False)  # type: ignore[no-untyped-call]
                torch.jit.save(traced, str(path), _extra_files=graph.metadata)
    except Exception as error:
        raise ModelError(
            f"the detector cannot be exported as {name}: {short_message(error)}; "
            "format=safetensors writes its weights"
        ) from error


def _write_onnx(graph: Exportable, example: Tensor, path: Path) -> None:
    import onnx

    # torch.export refuses what torchvision's detectors decide by the number of boxes; torchvision
    # supports the exporter that traces.
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            graph.network,
            (example,),
            str(path),
            dynamo=False,
            opset_version=_OPSET,
            input_names=["input"],
            output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "n"} for name in OUTPUTS},
        )
    save_onnx(onnx.load(str(path)), path, graph.facts)


def box_answer(answer: Callable[[Tensor], Any], x: Tensor) -> dict[str, Tensor]:
    """Return what a loaded file answers for one picture [1, C, S, S], by name."""
    found = answer(x)
    if not isinstance(found, dict):
        found = dict(zip(OUTPUTS, found, strict=True))
    return found


def box_difference(graph: Exportable, answer: Callable[[Tensor], Any]) -> float:
    """Return the largest difference of a file's boxes and scores to its network's.

    Compared for pictures of the run and a black one. A box is compared with the nearest one of its
    class, so that two of equal scores may change places. Raises ModelError for a difference above
    1e-4 of the side of the picture, or of 1 for scores.

    Of boxes that overlap and have equal scores, rounding decides which one is suppressed. So a
    picture whose scores agree while boxes do not is left out, unless there is no other.
    """
    samples = torch.cat([graph.samples[:_PICTURES], torch.zeros_like(graph.samples[:1])])
    largest = 0.0
    numbers = []
    undecided = 0
    for index in range(len(samples)):
        picture = samples[index : index + 1]
        with torch.inference_mode():
            expected = dict(zip(OUTPUTS, graph.network(picture.clone()), strict=True))
            found = box_answer(answer, picture.clone())
        difference = _distance(expected, found, picture.shape[-1])
        if not difference <= _TOLERANCE and _have_equal_scores(expected, found):
            undecided += 1
            continue
        numbers.append(len(expected["boxes"]))
        largest = max(largest, difference)
        if not largest <= _TOLERANCE:
            raise ModelError(
                f"the boxes of the {graph.facts['format']} file differ from the model's: "
                f"{len(found['boxes'])} and {len(expected['boxes'])} of them, by {largest:.2g} of "
                "the side"
            )
    if undecided and not sum(numbers):
        raise ModelError(
            f"the {graph.facts['format']} file cannot be compared with the model: in all of "
            f"{undecided} pictures it has boxes of equal scores, as a model has that was hardly "
            "trained: train it for longer; format=safetensors writes its weights"
        )
    graph.facts["verified"] |= {"pictures": len(numbers), "boxes": sum(numbers)}
    return largest


def _have_equal_scores(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two answers have as many boxes, with the same scores in order."""
    if len(one["scores"]) != len(other["scores"]):
        return False
    differences = one["scores"].sort().values.double() - other["scores"].sort().values.double()
    # On the host: an export has no other device.
    return bool((differences.abs() <= _TOLERANCE).all())


def _distance(one: dict[str, Tensor], other: dict[str, Tensor], side: int) -> float:
    """Return how far a box or score is from the nearest one of its class, of both sets."""
    if len(one["boxes"]) != len(other["boxes"]):
        return float("inf")
    if not len(one["boxes"]):
        return 0.0
    places = torch.cdist(one["boxes"].double(), other["boxes"].double(), p=float("inf")) / side
    scores = (one["scores"].double()[:, None] - other["scores"]).abs()
    distances = torch.maximum(places, scores)
    is_other_class = one["labels"][:, None] != other["labels"]
    distances = distances.masked_fill(is_other_class, float("inf"))
    return float(torch.maximum(distances.amin(0).max(), distances.amin(1).max()))
