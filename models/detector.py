"""torchvision's detectors by name, for the classes of the data, with or without trained weights."""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torchvision
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FasterRCNN
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD

from regimen.conf.errors import truncated_list
from regimen.models.layers import NetworkError
from regimen.models.pretrained import fetch, first_mismatch, read_weights, weights_wanted
from regimen.trainer.errors import CheckpointError

log = logging.getLogger(__name__)
_MORE_THAN_BOXES = ("maskrcnn", "keypointrcnn")  # they are trained on masks and key points
_BACKBONE = "model.weights_backbone"
_COUNTER = "num_batches_tracked"  # of BatchNorm; weights that were frozen have none


class Detector(nn.Module):
    """A detector of torchvision whose classes are numbered from 0, without the background.

    In training it returns the losses by name, in an evaluation the boxes of each image, as the
    detector itself does.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        # These two number the background 0.
        self.first_class = 1 if isinstance(network, FasterRCNN | SSD) else 0
        # Others divide a loss by the boxes, or by the anchors drawn, of the whole micro-batch.
        self.couples_samples = not isinstance(network, RetinaNet)

    def forward(self, images: Any, targets: Sequence[dict[str, Tensor]] | None = None) -> Any:
        """Map images (n, 3, H, W), and in training their targets, to losses or boxes."""
        if targets is not None:
            shifted = []
            for target in targets:
                labels = target["labels"] + self.first_class
                shifted.append({"boxes": target["boxes"], "labels": labels})
            targets = shifted
        found = self.network(images, targets)
        if isinstance(found, Mapping):
            return found  # the losses
        answers = []
        for answer in found:
            answers.append({**answer, "labels": answer["labels"] - self.first_class})
        return answers


def detector(
    name: str,
    num_classes: int,
    image_size: int,
    weights: str | None = None,
    weights_backbone: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    score_thresh: float = 0.05,
    detections_per_img: int = 100,
    **arguments: Any,
) -> Detector:
    """Build torchvision's detector `name`; `arguments` go to its builder.

    num_classes: without the background. image_size: pixels a side of the images; SSD scales them to
    its own size.
    weights: of the whole detector, an entry of torchvision's (`DEFAULT`, `COCO_V1`), a file or the
    directory of a run. Layers whose number of outputs differs, those of the classes, begin anew.
    weights_backbone: of the network below a feature pyramid, a file or
    `torchvision:ResNet50_Weights.DEFAULT`.
    mean, std: what is subtracted and divided by; None: those that torchvision trains with.
    Raises NetworkError, and CheckpointError for weights that do not fit.
    """
    names = []
    for known in torchvision.models.list_models(module=torchvision.models.detection):
        if not known.startswith(_MORE_THAN_BOXES):
            names.append(known)
    if name not in names:
        nearest = get_close_matches(name, names) or names
        raise NetworkError(
            f"model.name: torchvision has no detector {name!r}; there are {', '.join(nearest)}"
        )
    if weights is not None and weights_backbone is not None:
        raise NetworkError(
            f"{_BACKBONE} has no effect beside model.weights, which hold the backbone: "
            "leave one of both out"
        )
    is_ssd = name.startswith("ssd")
    if is_ssd and weights_backbone is not None:
        raise NetworkError(
            f"{_BACKBONE}: {name} has no feature pyramid; model.weights takes the weights of the "
            "whole detector"
        )
    is_faster_rcnn = name.startswith("fasterrcnn")
    prefix = ""
    if is_faster_rcnn:
        prefix = "box_"
    options: dict[str, Any] = {
        f"{prefix}score_thresh": score_thresh,
        f"{prefix}detections_per_img": detections_per_img,
    }
    if not is_ssd:
        options |= {"min_size": image_size, "max_size": image_size}
    if mean is not None:
        options["image_mean"] = list(mean)
    if std is not None:
        options["image_std"] = list(std)
    outputs = num_classes
    if is_ssd or is_faster_rcnn:
        outputs += 1  # the background
    network = torchvision.models.get_model_builder(name)(
        weights=None,
        # torchvision would download them by default.
        weights_backbone=None,
        num_classes=outputs,
        **options | arguments,
    )
    if weights is not None and weights_wanted():
        _load(network, _weights_of(name, weights), weights)
    if weights_backbone is not None and weights_wanted():
        _load_backbone(network.backbone.body, weights_backbone)
    return Detector(network)


def _weights_of(name: str, weights: str) -> Mapping[str, Tensor]:
    """Return a detector's weights, an entry of torchvision's or those of a file or a run."""
    entries = torchvision.models.get_model_weights(name).__members__
    if weights in entries:
        return fetch(entries[weights])
    try:
        state = read_weights(weights)
    except NetworkError as error:
        raise NetworkError(
            f"{error}; torchvision has for {name}: {', '.join(entries) or 'none'}"
        ) from error
    return {key.removeprefix("network."): value for key, value in state.items()}


def _load(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights but for the layers of other numbers of classes."""
    own = network.state_dict()
    fitting = {}
    anew = []
    for name, value in state.items():
        if name not in own or own[name].shape == value.shape:
            fitting[name] = value
        elif own[name].shape[1:] == value.shape[1:] and not name.startswith("backbone."):
            anew.append(name)
        else:
            raise CheckpointError(
                f"model.weights={source}: {name} has the shape {list(value.shape)}, the detector's "
                f"is {list(own[name].shape)}"
            )
    result = network.load_state_dict(fitting, strict=False)
    missing = [n for n in result.missing_keys if n not in anew and not n.endswith(_COUNTER)]
    if missing or result.unexpected_keys:
        raise CheckpointError(
            f"model.weights={source} does not fit the detector: missing "
            f"{truncated_list(missing, 4) or 'none'}; unknown "
            f"{truncated_list(result.unexpected_keys, 4) or 'none'}"
        )
    report = f"{len(fitting)} tensors loaded"
    if anew:
        report += f"; anew for the classes: {truncated_list(anew, 4)}"
    log.info("initial weights %s: %s", source, report)


def _load_backbone(body: nn.Module, source: str) -> None:
    """Load the weights of a classifier into the layers that a detector has of it."""
    own = body.state_dict()
    state = {}
    for name, value in read_weights(source, key=_BACKBONE).items():
        inner = name.removeprefix("features.")  # of MobileNet, whose classifier stands beside them
        if inner in own:
            state[inner] = value
    missing = [name for name in own if name not in state and not name.endswith(_COUNTER)]
    if missing:
        raise CheckpointError(
            f"{_BACKBONE}={source} lacks {truncated_list(missing, 4)}: it is of another network"
        )
    try:
        body.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{_BACKBONE}={source}: {first_mismatch(error)}") from error
    log.info("initial weights %s: %d tensors of the backbone loaded", source, len(state))
