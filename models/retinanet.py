"""torchvision's RetinaNet on a ResNet-18 without pretrained weights, for small pictures."""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torchvision.models import resnet18
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN

_CHANNELS = {1: 64, 2: 128, 3: 256, 4: 512}  # of ResNet-18's stages, whose strides are 4, 8, 16, 32


def retinanet(
    num_classes: int,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    stages: Sequence[int] = (1, 2),
    anchor_sizes: Sequence[Sequence[int]] = ((10, 14), (16, 22), (28, 40)),
    aspect_ratios: Sequence[float] = (1.0,),
    channels: int = 64,
    score_thresh: float = 0.05,
    detections_per_img: int = 100,
) -> RetinaNet:
    """Build a RetinaNet; its images (n, 3, `image_size`, `image_size`) are in [0, 1].

    stages: those of the ResNet that the feature pyramid begins with; a pooled one follows.
    anchor_sizes: pixels a side of the anchors of each stage and of the pooled one, for objects of
    such sizes. channels: of the pyramid and the heads.

    In training it returns the losses, which are means over the images; in evaluation the boxes.
    With GroupNorm instead of BatchNorm an update is the same however it is split into
    micro-batches. Raises ValueError.
    """
    if not stages or [*stages] != sorted({*stages} & _CHANNELS.keys()):
        raise ValueError(f"stages={[*stages]}: give some of {[*_CHANNELS]}, ascending")
    if len(anchor_sizes) != len(stages) + 1:
        raise ValueError(
            f"anchor_sizes has {len(anchor_sizes)} lists for {len(stages)} stages and the pooled "
            "one: give one for each"
        )
    network = resnet18(weights=None, norm_layer=partial(nn.GroupNorm, 8))
    returned = {f"layer{stage}": str(place) for place, stage in enumerate(stages)}
    backbone = BackboneWithFPN(
        network,
        returned,
        in_channels_list=[_CHANNELS[stage] for stage in stages],
        out_channels=channels,
    )
    sizes = tuple(tuple(of_stage) for of_stage in anchor_sizes)
    return RetinaNet(
        backbone,
        num_classes,
        anchor_generator=AnchorGenerator(sizes, (tuple(aspect_ratios),) * len(sizes)),
        min_size=image_size,
        max_size=image_size,
        image_mean=list(mean),
        image_std=list(std),
        score_thresh=score_thresh,
        detections_per_img=detections_per_img,
    )
