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
    assert out.shape == expected
    out.square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None and "generator" not in n]
    assert idle == []


def test_mlp_is_deterministic_and_has_no_batch_statistics():
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not any(isinstance(module, kinds) for module in MLP(10).modules())


def test_attention_equals_torchs():
    torch.manual_seed(0)
    ours = Attention(dim=12, heads=3, dropout=0.0, causal=False)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    named = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    named |= {"out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias}
    theirs.load_state_dict(named)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_fixed_positions_are_sines_of_column_and_row():
    """Element by element, as the formula is written."""
    positions = sincos_positions(2, 3, 12)
    for place in range(6):
        row, column = divmod(place, 3)
        for k in range(3):
            frequency = 10_000 ** -(k / 2)
            expected = [
                *(math.sin(column * frequency), math.cos(column * frequency)),
                *(math.sin(row * frequency), math.cos(row * frequency)),
            ]
            assert positions[place, k::3].tolist() == pytest.approx(expected, abs=1e-6)
    with_token = ViT(10, depth=1, positions="sincos")
    assert with_token.pos_embed[0, 0].abs().max() == 0
    assert torch.equal(with_token.pos_embed[0, 1:], sincos_positions(4, 4, 192))
    assert "pos_embed" not in dict(with_token.named_parameters())
    with pytest.raises(NetworkError, match="multiple of 4"):
        ViT(10, dim=6, positions="sincos")


def test_the_mean_over_the_patches_is_that_of_the_normalised_outputs():
    torch.manual_seed(0)
    model = ViT(5, depth=1, pool="mean").eval()
    assert model.cls_token is None
    assert model.pos_embed.shape[1] == 16
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    out = model(torch.randn(2, 1, 16, 16))
    torch.testing.assert_close(out, model.head(seen[0].sum(1) / 16))


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


def test_gpt_starts_near_a_uniform_guess_with_small_branches_and_tied_weights():
    torch.manual_seed(0)
    model = GPT(50, context=8, depth=8)
    assert model.head.weight is model.token_embed.weight
    assert GPT(50, tie_weights=False).head.weight is not model.token_embed.weight
    for layer in (model.blocks[3].attn.proj, model.blocks[3].mlp.fc2):
        assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    tokens = torch.randint(50, (8, 8))
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(torch.log(torch.tensor(50.0)).item(), abs=0.2)


def test_gan_calls_both_networks_through_forward():
    model = GAN(in_channels=1, image_size=16, latent_dim=4, width=8)
    images = model(torch.randn(3, 4), part="generator")
    assert images.shape == (3, 1, 16, 16)
    assert images.abs().max() <= 1
    model(images.detach()).sum().backward()
    touched = {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None}
    assert touched == {"discriminator"}


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_resnet_with_imagenet_stem_equals_torchvisions(depth):
    torch.manual_seed(0)
    reference = torchvision.models.get_model(f"resnet{depth}", num_classes=7)
    model = ResNet(depth, num_classes=7, in_channels=3, stem="imagenet")
    drawn = {name: value.std() for name, value in model.named_parameters() if value.ndim > 1}
    for name, value in reference.named_parameters():  # one distribution
        if value.ndim > 1:
            torch.testing.assert_close(drawn[name], value.std(), rtol=0.05, atol=0)
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 64, 64)
    for mode in (True, False):  # training first: it moves BatchNorm's statistics
        model.train(mode)
        reference.train(mode)
        torch.testing.assert_close(model(images), reference(images), rtol=0, atol=0)
    moved = zip(model.buffers(), reference.buffers(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in moved)


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
    assert model.conv1.stride == (stride, stride)
    small = stride == 1  # the cifar stem keeps the size
    images = model.maxpool(model.conv1(torch.zeros(1, 3, 16, 16)))
    assert images.shape == ((1, 64, 16, 16) if small else (1, 64, 4, 4))


@pytest.mark.parametrize("depth", [18, 50])
def test_zero_init_makes_each_block_its_shortcut(depth):
    model = ResNet(depth, num_classes=10, zero_init_residual=True).eval()
    x = torch.rand(2, 64 if depth == 18 else 256, 4, 4)
    torch.testing.assert_close(model.layer1[1](x), x, rtol=0, atol=0)


def test_each_activation_is_a_separate_module():
    model = ResNet(18, num_classes=10)
    calls = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda m, *_: calls.append(m))
    model(torch.zeros(2, 3, 8, 8))
    assert len(calls) == len(set(calls)) == 17


def layers(features=32):
    return [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.5), nn.Linear(features, 10)]  # fmt: skip


def test_a_list_becomes_the_sequential_written_by_hand():
    torch.manual_seed(0)
    model = from_layers(layers(), [1, 4, 4])
    state = torch.get_rng_state()
    torch.manual_seed(0)
    by_hand = nn.Sequential(*layers())
    assert torch.equal(state, torch.get_rng_state())
    found = zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in found)  # BatchNorm's statistics, too
    assert all(module.training for module in model.modules())
    x = torch.randn(2, 1, 4, 4)
    torch.testing.assert_close(model.eval()(x), by_hand.eval()(x), rtol=0, atol=0)


def test_a_mapping_keeps_names_drops_none_and_sizes_lazy_layers():
    given = {"flat": nn.Flatten(), "noise": None, "mid": nn.LazyLinear(3)}
    model = from_layers(given, [2, 5], num_classes=4)
    assert [name for name, _ in model.named_children()] == ["flat", "mid", "head"]
    assert (model.mid.weight.shape, model.head.weight.shape) == ((3, 10), (4, 3))
    assert model.mid.weight.requires_grad


MISFITS = {
    "patch_size=4": lambda: ViT(10, image_size=18),
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
