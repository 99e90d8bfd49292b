"""torchvision's and timm's models behind our two arguments."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.hub import get_dir

from models import timm_adapter, torchvision_adapter
from models.errors import NetworkError, WeightsError
from models.weights import no_initial_weights


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A trained ResNet-18 in place of what torchvision would download."""
    torch.manual_seed(1)
    trained = torchvision.models.resnet18()
    monkeypatch.setattr(
        torchvision.models.ResNet18_Weights,
        "get_state_dict",
        lambda self, *args, **kwargs: trained.state_dict(),
    )
    return trained


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "shufflenet_v2_x0_5", "mnasnet0_5"])
def test_without_weights_it_is_torchvisions_own(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision_adapter.build(name, num_classes=5).eval()
    torch.manual_seed(0)
    reference = torchvision.models.get_model(name, num_classes=5).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


def test_arguments_reach_the_builder_and_channels_follow_the_data() -> None:
    model = torchvision_adapter.build("mobilenet_v3_small", 5, in_channels=1, dropout=0.7).eval()
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.7}
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5)


def test_fresh_weights_keep_their_spread_with_other_channels() -> None:
    grey = torchvision_adapter.build("resnet18", 5, in_channels=1)
    colour = torchvision_adapter.build("resnet18", 5)
    assert grey.conv1.weight.std().item() == pytest.approx(
        colour.conv1.weight.std().item(), rel=0.1
    )


def test_trained_weights_with_a_fresh_head(cached: nn.Module) -> None:
    model = torchvision_adapter.build("resnet18", num_classes=5, weights="DEFAULT")
    assert model.fc.weight.shape == (5, 512)
    own, theirs = model.state_dict(), cached.state_dict()
    assert all(torch.equal(own[n], theirs[n]) for n in own if not n.startswith("fc."))


def test_trained_weights_see_a_grey_image_as_before(cached: nn.Module) -> None:
    model = torchvision_adapter.build("resnet18", 1000, in_channels=1, weights="DEFAULT").eval()
    grey = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(model(grey), cached.eval()(grey.expand(-1, 3, -1, -1)))


def test_weights_are_not_fetched_on_meta_nor_for_a_checkpoints_sake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchvision_adapter, "fetch", lambda entry: pytest.fail("fetched"))
    with torch.device("meta"):
        torchvision_adapter.build("resnet18", 5, in_channels=1, weights="DEFAULT")
    with no_initial_weights():
        torchvision_adapter.build("inception_v3", 5, weights="DEFAULT")


def test_no_network_says_where_the_file_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", refuse)
    with pytest.raises(WeightsError, match=f"unreachable.*{get_dir()}"):
        torchvision_adapter.build("resnet18", 5, weights="DEFAULT")


def test_segmentation_gives_its_main_output_and_downloads_nothing() -> None:
    model = torchvision_adapter.build("lraspp_mobilenet_v3_large", num_classes=4).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"name": "resnet81"}, "nearest: resnet18", id="name"),
        pytest.param({"name": "resnet18", "weights": "BEST"}, "IMAGENET1K_V1", id="weights"),
        pytest.param(
            {"name": "ssd300_vgg16", "weights": "DEFAULT"}, "cannot be resized", id="detection"
        ),
    ],
)
def test_a_wrong_name_lists_what_there_is(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        torchvision_adapter.build(num_classes=5, **arguments)


def test_timm_is_given_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def create_model(name: str, **arguments: Any) -> nn.Module:
        given.update(arguments, name=name)
        return nn.Linear(1, 1)

    def list_models(pattern: str = "*") -> list[str]:
        return ["vit_small"]

    fake = SimpleNamespace(create_model=create_model, list_models=list_models)
    monkeypatch.setitem(sys.modules, "timm", fake)
    timm_adapter.build("vit_small", 7, in_channels=1, pretrained=True, img_size=16)
    assert given == {
        "name": "vit_small", "num_classes": 7, "in_chans": 1, "pretrained": True, "img_size": 16
    }  # fmt: skip
    with pytest.raises(NetworkError, match="vit_smell"):
        timm_adapter.build("vit_smell", 7)


def test_timm_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(NetworkError, match="pip install timm"):
        timm_adapter.build("resnet18", 7)
