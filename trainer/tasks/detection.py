"""Object detection: boxes and their classes, by a detector that computes its own losses."""

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regimen.data.batch import map_tensors
from regimen.trainer.errors import ModelError, SampleError, describe_value, qualified_name
from regimen.trainer.task import Metric, StepOutput, Task

Boxes = dict[str, Tensor]  # of one image
_KEYS = {"50_95": "map", "50": "map_50", "75": "map_75"}  # torchmetrics' names of ours
_OF_TRUTH = ("boxes", "labels", "iscrowd")
_OF_ANSWER = ("boxes", "scores", "labels")


class AveragePrecision:
    """Mean average precision as COCO defines it, by torchmetrics with `faster_coco_eval`.

    Values: `50_95` (the mean over the overlaps 0.5, 0.55, ... 0.95), `50`, `75`, and with
    `per_class` the value of each class over 0.5 to 0.95, by its name. NaN of a class without boxes.

    The boxes of all images are kept until `compute`, and compared in the order of `image_id`. So
    the value is the same in any number of processes, also where scores are equal: COCO ranks boxes
    of equal scores by the order of their images.
    """

    higher_is_better = True

    def __init__(self, num_classes: int, per_class: bool = False) -> None:
        # Found out before a training, at the end of whose first epoch it would be missed.
        missing = [name for name in ("torchmetrics", "faster_coco_eval") if not find_spec(name)]
        if missing:
            raise ModelError(
                f"mAP needs the package {missing[0]}, which is not installed: "
                "pip install 'torch-regimen[detection]'"
            )
        self._per_class = per_class
        self._names = [str(number) for number in range(num_classes)]
        self._images: list[tuple[Tensor, Boxes, Boxes]] = []  # id, answer, truth

    @property
    def keys(self) -> list[str]:
        """The names of the values."""
        if self._per_class:
            return [*_KEYS, *self._names]
        return [*_KEYS]

    def name_classes(self, classes: Sequence[str]) -> None:
        """Take the names of a data set's classes, unless they are too few or not distinct."""
        # A slash would make another level of a logged name.
        names = [name.replace("/", "_") for name in classes]
        # Distinct from each other, and from our own names: a class may be called 50.
        are_distinct = len({*names, *_KEYS}) == len(names) + len(_KEYS)
        if are_distinct and len(names) == len(self._names):
            self._names = names

    def reset(self) -> None:
        """Forget all images."""
        self._images = []

    def update(self, output: Sequence[Boxes], target: Sequence[Boxes]) -> None:
        """Add the answers for some images and what is there; nothing waits for the device."""
        for answer, truth in zip(output, target, strict=True):
            # Without ids images stay in the order in which they came.
            number = truth.get("image_id", torch.tensor(len(self._images)))
            found = {}
            for name in _OF_ANSWER:
                found[name] = answer[name].detach()
            kept = {}
            for name in _OF_TRUTH:
                if name in truth:  # `iscrowd` may be missing
                    kept[name] = truth[name]
            self._images.append((number, found, kept))

    def merge_state(self, others: Sequence["AveragePrecision"]) -> None:
        """Add the images of other processes."""
        for other in others:
            self._images += other._images

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes, in the memory of the host."""
        return {**vars(self), "_images": self._images_on_host()}

    def compute(self) -> dict[str, float]:
        """Return the values over all images; waits for the device. Raises ModelError."""
        from torchmetrics.detection import MeanAveragePrecision

        images = sorted(self._images_on_host(), key=lambda image: int(image[0]))
        self._check([found for _, found, _ in images])
        metric = MeanAveragePrecision(backend="faster_coco_eval", class_metrics=self._per_class)
        metric.warn_on_many_detections = False  # those beyond 100 in an image are not counted
        logging.getLogger("faster_coco_eval").setLevel(logging.WARNING)  # it logs a table
        metric.update([answer for _, answer, _ in images], [truth for *_, truth in images])
        found = metric.compute()
        values = {}
        for key, name in _KEYS.items():
            values[key] = float(found[name])
        if self._per_class:
            values |= dict.fromkeys(self._names, -1.0)
            classes = found["classes"].flatten().tolist()
            of_classes = found["map_per_class"].flatten().tolist()
            for number, value in zip(classes, of_classes, strict=True):
                values[self._names[number]] = value
        for key, value in values.items():
            if value < 0:  # COCO's -1 stands for "there is no box"
                values[key] = float("nan")
        return values

    def _check(self, answers: Sequence[Boxes]) -> None:
        """Raise ModelError for unknown classes and scores that are none, in answers on the host."""
        for answer in answers:
            labels = answer["labels"]
            is_unknown = (labels < 0) | (labels >= len(self._names))
            if is_unknown.any():
                raise ModelError(
                    f"the detector answers with class {int(labels[is_unknown][0])}, but there are "
                    f"{len(self._names)}, numbered from 0: the background is no class"
                )
            if answer["scores"].isnan().any():
                raise ModelError("the detector answers with a score of NaN: lower optimizer.lr")

    def _images_on_host(self) -> list[tuple[Tensor, Boxes, Boxes]]:
        # Waits for the device, at the end of an evaluation.
        images: list[tuple[Tensor, Boxes, Boxes]] = map_tensors(Tensor.cpu, self._images)
        return images


class Detection(Task):
    """Train a detector on the losses that it computes itself, as those of torchvision do.

    Batches are images (n, C, H, W), or a list of images, and a list of targets: `boxes` (n, 4),
    `labels` (n), in an evaluation also `image_id` and `iscrowd`. In training the model is called
    with both and returns its losses by name, means over the images. In an evaluation it is given
    the images and returns boxes, so an evaluation has no loss.

    A prediction returns boxes, too: in pixels of the original pictures where the targets have their
    `size` and `frame`, as those of data=detection.

    `couples_samples`: for a model whose loss divides by the boxes of the whole micro-batch, as
    torchvision's FCOS does, so that an update that is split is another one. RetinaNet's does not.
    """

    output_kind = "boxes"

    def __init__(
        self, num_classes: int, per_class: bool = False, couples_samples: bool = False
    ) -> None:
        self.num_classes = num_classes
        self.couples_samples = couples_samples
        self.precision = AveragePrecision(num_classes, per_class)

    def metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation."""
        return [f"map_{key}" for key in self.precision.keys]

    def monitor(self) -> str:
        """Return the metric that the best checkpoint is chosen by."""
        return "map_50_95"

    def modes(self) -> dict[str, str]:
        """Return the directions of the metrics."""
        return dict.fromkeys(self.metric_names(), "max")

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metric that `evaluation_step` updates."""
        return {"map": self.precision}

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the detector's losses by name. Raises ModelError for a model that has none."""
        losses = model(*_pair_of(batch))
        if not isinstance(losses, Mapping) or not losses:
            raise ModelError(
                f"{qualified_name(model)}.forward(images, targets) returned "
                f"{describe_value(losses)} in training, where task=detection takes a dict of "
                "losses: use a detector, such as model=retinanet"
            )
        return StepOutput(losses)

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compare the boxes that are found with those that are there."""
        images, targets = _pair_of(batch)
        found = model(images)
        self.precision.update(found, targets)
        return StepOutput({}, output=found)

    def prediction_step(self, model: nn.Module, batch: Any) -> list[Boxes]:
        """Return the boxes of each image; `batch` may be images alone."""
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            found: list[Boxes] = model(batch)
            return found
        images, targets = _pair_of(batch)
        answers = []
        for answer, target in zip(model(images), targets, strict=True):
            if "frame" in target:
                answers.append(_in_picture(answer, target))
            else:
                answers.append(answer)
        return answers


def _in_picture(answer: Boxes, target: Boxes) -> Boxes:
    """Return an answer whose boxes are in pixels of the picture that the image was made of."""
    start, end = target["frame"].double()
    height, width = target["size"]
    size = torch.stack([width, height])
    corners = answer["boxes"].double().view(-1, 2, 2)
    corners = ((corners - start) * (size / (end - start))).clamp(size * 0, size)
    boxes = corners.view(-1, 4)
    return {**answer, "boxes": boxes.to(answer["boxes"])}


def packed(answers: Sequence[Boxes]) -> Boxes:
    """Return the boxes of n images as tensors [n, m, ...]; where an image has fewer, labels are -1.

    `boxes` [n, m, 4], `scores` [n, m], `labels` [n, m].
    """
    joined = {}
    for name, fill in (("boxes", 0.0), ("scores", 0.0), ("labels", -1)):
        parts = [answer[name] for answer in answers]
        joined[name] = pad_sequence(parts, batch_first=True, padding_value=fill)
    return joined


def _pair_of(batch: Any) -> tuple[Any, Sequence[Boxes]]:
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    if not is_pair or not isinstance(batch[1], list | tuple):
        raise SampleError(
            f"task=detection takes images and a list of targets, not {describe_value(batch)}: use "
            "data=detection, and loader.collate_fn="
            "{_target_: regimen.data.formats.detection_folder.collate_boxes, _partial_: true}"
        )
    return batch[0], batch[1]
