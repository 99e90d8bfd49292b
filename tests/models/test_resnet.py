"""Our ResNets against torchvision's."""

import pytest
import torch
import torchvision
from torch import nn

from models.errors import NetworkError
from models.resnet import ResNet


@pytest.mark.parametrize(
    ("depth", "block"),
    [
        pytest.param(18, "bn2", id="18"),
        pytest.param(34, "bn2", id="34"),
        pytest.param(50, "bn3", id="50"),
    ],
)
def test_imagenet_form_is_torchvisions(depth: int, block: str) -> None:
    torch.manual_seed(0)
    reference = torchvision.models.get_model(f"resnet{depth}", num_classes=7)
    model = ResNet(depth, num_classes=7, in_channels=3, stem="imagenet")
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 64, 64)
    for mode in (True, False):  # training first: it moves BatchNorm's statistics
        model.train(mode)
        reference.train(mode)
        torch.testing.assert_close(model(images), reference(images), rtol=0, atol=0)
    assert torch.equal(
        getattr(model.layer4[-1], block).running_var,
        getattr(reference.layer4[-1], block).running_var,
    )


def test_initial_weights_are_drawn_as_torchvisions() -> None:
    torch.manual_seed(0)
    model = ResNet(18, num_classes=10, stem="imagenet")
    reference = torchvision.models.resnet18(num_classes=10)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if ours.ndim > 1:
            torch.testing.assert_close(ours.std(), theirs.std(), rtol=0.05, atol=0, msg=name)


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        pytest.param(16, 1, id="small"),
        pytest.param(64, 1, id="edge"),
        pytest.param(65, 2, id="large"),
        pytest.param([64, 224], 2, id="rectangle"),
        pytest.param(None, 1, id="unknown"),
    ],
)
def test_the_stem_follows_the_image_size_unless_it_is_set(size, stride) -> None:
    assert ResNet(18, num_classes=2, stem="auto", image_size=size).conv1.stride == (stride, stride)
    assert ResNet(18, num_classes=2, stem="cifar", image_size=224).conv1.stride == (1, 1)


def test_cifar_stem_keeps_the_size_and_channels_follow_the_data() -> None:
    model = ResNet(18, num_classes=10, in_channels=1, stem="cifar").eval()
    assert model.layer1(model.maxpool(model.conv1(torch.zeros(1, 1, 16, 16)))).shape == (
        1,
        64,
        16,
        16,
    )
    assert model(torch.zeros(3, 1, 16, 16)).shape == (3, 10)


@pytest.mark.parametrize("depth", [18, 50])
def test_zero_init_makes_each_block_its_shortcut(depth: int) -> None:
    model = ResNet(depth, num_classes=10, zero_init_residual=True).eval()
    block = model.layer1[1]
    x = torch.rand(2, 64 if depth == 18 else 256, 4, 4)
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)


def test_each_activation_is_a_module_of_its_own() -> None:
    model = ResNet(18, num_classes=10)
    calls: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            calls[id(module)] = 0
            module.register_forward_hook(lambda m, *_: calls.__setitem__(id(m), calls[id(m)] + 1))
    model(torch.zeros(2, 3, 8, 8))
    assert len(calls) == 17
    assert set(calls.values()) == {1}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param({"depth": 20}, "depth", id="depth"),
        pytest.param({"depth": 18, "stem": "cifer"}, "stem", id="stem"),
        pytest.param({"depth": 18, "activation": "rellu"}, "did you mean 'relu'", id="activation"),
    ],
)
def test_a_wrong_word_is_named(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(NetworkError, match=word) as caught:
        ResNet(num_classes=10, **arguments)
    assert caught.value.exit_code == 2
