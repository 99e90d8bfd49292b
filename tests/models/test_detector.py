"""torchvision's detectors by name: their class numbers, and weights for other classes."""

import pytest
import torch
from torchvision.models.detection import (
    fcos_resnet50_fpn,
    retinanet_resnet50_fpn,
    ssdlite320_mobilenet_v3_large,
)

from regimen.models.detector import detector
from regimen.models.layers import NetworkError
from regimen.models.pretrained import no_initial_weights
from regimen.trainer.errors import CheckpointError
from regimen.trainer.task import batch_dependence_warning
from regimen.trainer.tasks.detection import Detection

SSDLITE = "ssdlite320_mobilenet_v3_large"
PLAIN = {"weights": None, "weights_backbone": None}


def batch():
    draws = torch.Generator().manual_seed(0)
    boxes = torch.tensor([[4.0, 6, 30, 40], [20, 20, 60, 50]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([2, 0]), "image_id": torch.tensor(0)},
        {"boxes": boxes[:0], "labels": torch.tensor([], dtype=torch.int64)},
    ]
    return torch.rand(2, 3, 64, 64, generator=draws), targets


def by_hand(network, images, targets, shift):
    """Return losses and answers of torchvision's own network, whose classes begin at `shift`."""
    shifted = [{**target, "labels": target["labels"] + shift} for target in targets]
    torch.manual_seed(1)
    losses = network.train()(list(images), shifted)
    network.eval()
    with torch.no_grad():
        return losses, network(list(images))


@pytest.mark.parametrize(
    ("name", "build", "shift", "size"),
    [
        pytest.param(SSDLITE, ssdlite320_mobilenet_v3_large, 1, {}, id="background is 0"),
        pytest.param(
            "fcos_resnet50_fpn",
            fcos_resnet50_fpn,
            0,
            {"min_size": 64, "max_size": 64},
            id="no background",
        ),
    ],
)
def test_classes_are_numbered_from_0_and_losses_are_torchvisions(name, build, shift, size):
    images, targets = batch()
    torch.manual_seed(0)
    model = detector(name, 3, 64, score_thresh=0.0, detections_per_img=50)
    torch.manual_seed(0)
    plain = build(num_classes=3 + shift, score_thresh=0.0, detections_per_img=50, **PLAIN, **size)
    expected_losses, expected = by_hand(plain, images, targets, shift)
    torch.manual_seed(1)
    losses = model.train()(images, targets)
    assert losses.keys() == expected_losses.keys()
    for key, value in losses.items():
        torch.testing.assert_close(value, expected_losses[key], rtol=0, atol=0)
    model.eval()
    with torch.no_grad():
        found = model(images)
    for answer, other in zip(found, expected, strict=True):
        torch.testing.assert_close(answer["boxes"], other["boxes"], rtol=0, atol=0)
        assert torch.equal(answer["labels"] + shift, other["labels"])
        assert {*answer["labels"].tolist()} <= {0, 1, 2}


def test_the_plan_says_which_depend_on_the_batch():
    task = Detection(3)
    with torch.device("meta"):
        free = detector("retinanet_resnet50_fpn", 3, 64)
        coupled = detector("fasterrcnn_mobilenet_v3_large_320_fpn", 3, 64)
    assert batch_dependence_warning(task, free, 4, 2) is None
    assert batch_dependence_warning(task, coupled, 1, 1) is None
    warning = batch_dependence_warning(task, coupled, 4, 1)
    assert warning.startswith("regimen.models.detector.Detector couples the samples")


def test_weights_of_other_classes_are_loaded_but_for_the_layers_of_the_classes(tmp_path):
    torch.manual_seed(0)
    trained = ssdlite320_mobilenet_v3_large(num_classes=8, **PLAIN).state_dict()
    torch.save(trained, tmp_path / "weights.pth")
    model = detector(SSDLITE, 3, 64, weights=str(tmp_path / "weights.pth"))
    anew = [
        name
        for name, value in model.network.state_dict().items()
        if value.shape != trained[name].shape
    ]
    assert anew
    assert all(name.startswith("head.classification_head") for name in anew)
    for name, value in model.network.state_dict().items():
        assert name in anew or torch.equal(value, trained[name])

    # A detector that was saved by a run has its own numbers of classes, and fits as a whole.
    torch.save(model.state_dict(), tmp_path / "own.pth")
    again = detector(SSDLITE, 3, 64, weights=str(tmp_path / "own.pth"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    with no_initial_weights():  # a resumed run does not need the file
        detector(SSDLITE, 3, 64, weights=str(tmp_path / "gone.pth"))


def test_a_backbone_is_loaded_from_a_classifier(tmp_path):
    from torchvision.models import mobilenet_v3_large, resnet50

    torch.manual_seed(0)
    torch.save(resnet50().state_dict(), tmp_path / "resnet.pth")
    torch.save(mobilenet_v3_large().state_dict(), tmp_path / "mobile.pth")
    for name, file, prefix in [
        ("retinanet_resnet50_fpn", "resnet.pth", ""),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "mobile.pth", "features."),
    ]:
        saved = torch.load(tmp_path / file)
        body = detector(
            name, 3, 64, weights_backbone=str(tmp_path / file)
        ).network.backbone.body.state_dict()
        for key, value in body.items():
            assert torch.equal(value, saved[prefix + key])
    with pytest.raises(CheckpointError, match="it is of another network"):
        detector("retinanet_resnet50_fpn", 3, 64, weights_backbone=str(tmp_path / "mobile.pth"))
    for source, told in [("gone.pth", "no file gone.pth"), ("torchvision:No", "no weights named")]:
        with pytest.raises(NetworkError, match=rf"^model\.weights_backbone: .*{told}"):
            detector("retinanet_resnet50_fpn", 3, 64, weights_backbone=source)
    with pytest.raises(NetworkError, match="has no feature pyramid"):
        detector(SSDLITE, 3, 64, weights_backbone=str(tmp_path / "mobile.pth"))


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(NetworkError, match="no detector 'retinanet'; there are fasterrcnn"):
        detector("retinanet", 3, 64)
    with pytest.raises(NetworkError, match="no detector 'maskrcnn"):
        detector("maskrcnn_resnet50_fpn", 3, 64)
    with pytest.raises(NetworkError, match=r"no file DEFALT; .* COCO_V1, DEFAULT"):
        detector(SSDLITE, 3, 64, weights="DEFALT")
    with pytest.raises(NetworkError, match="weights_backbone has no effect"):
        detector(SSDLITE, 3, 64, weights="DEFAULT", weights_backbone="x.pth")
    with torch.device("meta"):
        state = retinanet_resnet50_fpn(num_classes=3, **PLAIN).state_dict()
    some = {name: torch.zeros(value.shape) for name, value in [*state.items()][:3]}
    torch.save(some, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="does not fit the detector: missing backbone"):
        detector(SSDLITE, 3, 64, weights=str(tmp_path / "other.pth"))
