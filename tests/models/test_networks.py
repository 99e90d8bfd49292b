"""Our networks: shapes, each one's own promise, and ResNet against torchvision's."""

import math

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

from regimen.models.gan import GAN
from regimen.models.gpt import GPT
from regimen.models.layers import Attention, NetworkError
from regimen.models.mlp import MLP
from regimen.models.resnet import ResNet
from regimen.models.sequential import from_layers
from regimen.models.small_cnn import SmallCNN
from regimen.models.unet import UNet
from regimen.models.vit import ViT, sincos_positions


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        pytest.param(lambda: MLP(10), (3, 1, 16, 16), (3, 10), id="mlp"),
        pytest.param(lambda: MLP(1, in_features=8, hidden=()), (3, 8), (3, 1), id="mlp-features"),
        pytest.param(lambda: MLP(4, 3, (6, 4)), (3, 3, 6, 4), (3, 4), id="mlp-oblong"),
        pytest.param(lambda: SmallCNN(10), (3, 1, 16, 16), (3, 10), id="cnn"),
        pytest.param(lambda: SmallCNN(10), (3, 1, 1, 1), (3, 10), id="cnn-one-pixel"),
        pytest.param(lambda: ResNet(18, 10, 1), (3, 1, 16, 16), (3, 10), id="resnet-grey"),
        pytest.param(lambda: ViT(10, depth=2), (3, 1, 16, 16), (3, 10), id="vit"),
        pytest.param(
            lambda: ViT(10, depth=2, pool="mean", positions="sincos"),
            (3, 1, 16, 16),
            (3, 10),
            id="vit-mean",
        ),
        pytest.param(lambda: UNet(5), (3, 1, 16, 16), (3, 5, 16, 16), id="unet"),
        pytest.param(lambda: UNet(5, depth=3), (3, 1, 13, 7), (3, 5, 13, 7), id="unet-odd"),
        pytest.param(lambda: GAN(3, 8), (3, 3, 8, 8), (3, 1), id="gan-colour"),
    ],
)
def test_output_shape_and_gradients(make, shape, expected):
    model = make().train()

    out = model(torch.randn(shape))
    out.square().sum().backward()

    assert out.shape == expected
    for name, parameter in model.named_parameters():
        if "generator" not in name:  # a GAN judges here, and draws nothing
            assert parameter.grad is not None, name


def test_mlp_is_deterministic_and_has_no_batch_statistics():
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not any(isinstance(module, kinds) for module in MLP(10).modules())


def test_attention_equals_torchs():
    torch.manual_seed(0)
    ours = Attention(dim=12, heads=3, dropout=0.0, causal=False)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    weights = {
        "in_proj_weight": ours.qkv.weight,
        "in_proj_bias": ours.qkv.bias,
        "out_proj.weight": ours.proj.weight,
        "out_proj.bias": ours.proj.bias,
    }
    theirs.load_state_dict(weights)
    x = torch.randn(2, 5, 12)

    expected, _ = theirs(x, x, x, need_weights=False)

    torch.testing.assert_close(ours(x), expected)


def test_fixed_positions_are_sines_of_column_and_row():
    """Element by element, as the formula is written."""
    positions = sincos_positions(2, 3, 12)

    for place in range(6):
        row, column = divmod(place, 3)
        for k in range(3):
            frequency = 10_000 ** -(k / 2)
            expected = [
                math.sin(column * frequency),
                math.cos(column * frequency),
                math.sin(row * frequency),
                math.cos(row * frequency),
            ]
            found = positions[place, k::3].tolist()
            assert found == pytest.approx(expected, abs=1e-6)


def test_fixed_positions_are_no_parameters_and_none_for_the_class_token():
    model = ViT(10, depth=1, positions="sincos")

    of_token = model.pos_embed[0, 0]
    of_patches = model.pos_embed[0, 1:]
    assert of_token.abs().max() == 0
    assert torch.equal(of_patches, sincos_positions(4, 4, 192))
    names = [name for name, _ in model.named_parameters()]
    assert "pos_embed" not in names


def test_the_mean_over_the_patches_is_that_of_the_normalised_outputs():
    torch.manual_seed(0)
    model = ViT(5, depth=1, pool="mean").eval()
    assert model.cls_token is None
    assert model.pos_embed.shape[1] == 16
    normalised = []
    model.norm.register_forward_hook(lambda module, inputs, output: normalised.append(output))

    out = model(torch.randn(2, 1, 16, 16))

    mean = normalised[0].sum(1) / 16
    torch.testing.assert_close(out, model.head(mean))


def test_gpt_sees_no_future():
    torch.manual_seed(0)
    model = GPT(20, context=8, dim=16, depth=2, heads=2).eval()
    tokens = torch.randint(20, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 20
    before = model(tokens)
    after = model(changed)
    assert before.shape == (2, 8, 20)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt_starts_near_a_uniform_guess():
    torch.manual_seed(0)
    model = GPT(50, context=8, depth=8)
    tokens = torch.randint(50, (8, 8))

    logits = model(tokens)

    following = tokens.roll(-1, 1)
    loss = cross_entropy(logits.flatten(0, 1), following.flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.2)


def test_gpt_starts_with_small_branches_and_tied_weights():
    torch.manual_seed(0)
    model = GPT(50, context=8, depth=8)

    assert model.head.weight is model.token_embed.weight
    block = model.blocks[3]
    for layer in (block.attn.proj, block.mlp.fc2):
        # 0.02 / sqrt(2 * depth), as in GPT-2.
        assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    untied = GPT(50, tie_weights=False)
    assert untied.head.weight is not untied.token_embed.weight


def test_gan_calls_both_networks_through_forward():
    model = GAN(in_channels=1, image_size=16, latent_dim=4, width=8)

    images = model(torch.randn(3, 4), part="generator")
    model(images.detach()).sum().backward()

    assert images.shape == (3, 1, 16, 16)
    assert images.abs().max() <= 1
    for name, parameter in model.named_parameters():
        is_of_discriminator = name.startswith("discriminator.")
        assert (parameter.grad is not None) == is_of_discriminator


def resnets(depth):
    """Return our network and torchvision's."""
    torch.manual_seed(0)
    reference = torchvision.models.get_model(f"resnet{depth}", num_classes=7)
    model = ResNet(depth, num_classes=7, in_channels=3, stem="imagenet")
    return model, reference


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_resnet_is_initialised_from_torchvisions_distribution(depth):
    model, reference = resnets(depth)

    ours = dict(model.named_parameters())
    for name, theirs in reference.named_parameters():
        if theirs.ndim > 1:
            torch.testing.assert_close(ours[name].std(), theirs.std(), rtol=0.05, atol=0)


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_resnet_with_imagenet_stem_equals_torchvisions(depth):
    model, reference = resnets(depth)
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 64, 64)

    for mode in (True, False):  # training first: it moves BatchNorm's statistics
        model.train(mode)
        reference.train(mode)
        torch.testing.assert_close(model(images), reference(images), rtol=0, atol=0)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("stem", "size", "stride"),
    [
        pytest.param("auto", 64, 1, id="edge"),
        pytest.param("auto", 65, 2, id="large"),
        pytest.param("auto", [64, 224], 2, id="rectangle"),
        pytest.param("auto", None, 1, id="unknown"),
        pytest.param("cifar", 224, 1, id="set"),
    ],
)
def test_the_stem_follows_the_image_size_unless_it_is_set(stem, size, stride):
    model = ResNet(18, num_classes=2, stem=stem, image_size=size)

    images = model.conv1(torch.zeros(1, 3, 16, 16))
    images = model.maxpool(images)

    assert model.conv1.stride == (stride, stride)
    # The cifar stem keeps the size; ImageNet's pools, too.
    side = 16 if stride == 1 else 4
    assert images.shape == (1, 64, side, side)


@pytest.mark.parametrize(("depth", "channels"), [(18, 64), (50, 256)])
def test_zero_init_makes_each_block_its_shortcut(depth, channels):
    model = ResNet(depth, num_classes=10, zero_init_residual=True).eval()
    block = model.layer1[1]
    x = torch.rand(2, channels, 4, 4)

    torch.testing.assert_close(block(x), x, rtol=0, atol=0)


def test_each_activation_is_a_separate_module():
    model = ResNet(18, num_classes=10)
    calls = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda m, *_: calls.append(m))
    model(torch.zeros(2, 3, 8, 8))
    assert len(calls) == len(set(calls)) == 17


def layers(features=32):
    return [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(features, 10),
    ]


def test_a_list_becomes_the_sequential_written_by_hand():
    torch.manual_seed(0)
    model = from_layers(layers(), [1, 4, 4])
    state = torch.get_rng_state()

    torch.manual_seed(0)
    by_hand = nn.Sequential(*layers())
    assert torch.equal(state, torch.get_rng_state())
    for ours, theirs in zip(
        model.state_dict().values(), by_hand.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)  # BatchNorm's statistics, too
    assert all(module.training for module in model.modules())
    model.eval()
    by_hand.eval()
    x = torch.randn(2, 1, 4, 4)
    torch.testing.assert_close(model(x), by_hand(x), rtol=0, atol=0)


def test_a_mapping_keeps_names_drops_none_and_sizes_lazy_layers():
    given = {"flat": nn.Flatten(), "noise": None, "mid": nn.LazyLinear(3)}

    model = from_layers(given, [2, 5], num_classes=4)

    names = [name for name, _ in model.named_children()]
    assert names == ["flat", "mid", "head"]
    assert model.mid.weight.shape == (3, 10)
    assert model.head.weight.shape == (4, 3)
    assert model.mid.weight.requires_grad


MISFITS = {
    "patch_size=4": lambda: ViT(10, image_size=18),
    "sincos needs a multiple of 4": lambda: ViT(10, dim=6, positions="sincos"),
    r"model\.heads=5": lambda: ViT(10, heads=5),
    "8x8.*16x16": lambda: ViT(10, depth=1)(torch.zeros(1, 1, 8, 8)),
    "context is 4": lambda: GPT(9, context=4)(torch.zeros(1, 5).long()),
    "multiple of 4": lambda: GAN(image_size=18),
    r"\[9\].*latent_dim is 32": lambda: GAN()(torch.zeros(2, 9), "generator"),
    "'rellu'.*relu": lambda: ResNet(18, 10, activation="rellu"),
    "empty": lambda: from_layers([], [3, 4]),
    "returns a tuple": lambda: from_layers([nn.LSTM(4, 4)], [3, 4]),
    r"\.6 \(Linear\(in_.*=33.* of shape 32: [^\n]*$": lambda: from_layers(layers(33), [1, 4, 4]),
}


@pytest.mark.parametrize("message", MISFITS)
def test_invalid_networks_raise_network_errors(message):
    with pytest.raises(NetworkError, match=message) as caught:
        MISFITS[message]()
    assert caught.value.exit_code == 2
