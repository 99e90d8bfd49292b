"""The other networks: shapes, and each one's own promise."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models.errors import NetworkError
from models.gan import GAN
from models.gpt import GPT
from models.mlp import MLP
from models.small_cnn import SmallCNN
from models.transformer import Attention
from models.unet import UNet
from models.vit import ViT


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        pytest.param(lambda: MLP(10), (3, 1, 16, 16), (3, 10), id="mlp"),
        pytest.param(lambda: MLP(1, in_features=8, hidden=()), (3, 8), (3, 1), id="mlp-features"),
        pytest.param(lambda: MLP(4, 3, (6, 4)), (3, 3, 6, 4), (3, 4), id="mlp-oblong"),
        pytest.param(lambda: SmallCNN(10), (3, 1, 16, 16), (3, 10), id="cnn"),
        pytest.param(lambda: SmallCNN(10), (3, 1, 1, 1), (3, 10), id="cnn-one-pixel"),
        pytest.param(lambda: ViT(10, depth=2), (3, 1, 16, 16), (3, 10), id="vit"),
        pytest.param(lambda: UNet(5), (3, 1, 16, 16), (3, 5, 16, 16), id="unet"),
        pytest.param(lambda: UNet(5, depth=3), (3, 1, 13, 7), (3, 5, 13, 7), id="unet-odd"),
        pytest.param(lambda: GAN(), (3, 1, 16, 16), (3, 1), id="gan"),
        pytest.param(lambda: GAN(3, 8), (3, 3, 8, 8), (3, 1), id="gan-colour"),
    ],
)
def test_output_shape_and_gradients(
    make: Callable[[], nn.Module], shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    model = make().train()
    out = model(torch.randn(shape))
    assert out.shape == expected
    out.square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None and "generator" not in n]
    assert idle == []


def test_mlp_has_neither_batch_statistics_nor_chance() -> None:
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not any(isinstance(module, kinds) for module in MLP(10).modules())


def test_vit_blocks_are_found_by_name() -> None:
    names = [name for name, _ in ViT(10, depth=3).named_parameters()]
    assert {n.split(".")[1] for n in names if n.startswith("blocks.")} == {"0", "1", "2"}


def test_attention_equals_torchs() -> None:
    torch.manual_seed(0)
    ours = Attention(dim=12, heads=3, dropout=0.0, causal=False)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.proj.weight,
            "out_proj.bias": ours.proj.bias,
        }
    )
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_gpt_sees_no_future() -> None:
    torch.manual_seed(0)
    model = GPT(20, context=8, dim=16, depth=2, heads=2).eval()
    tokens = torch.randint(20, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 20
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 20)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt_starts_near_a_uniform_guess_and_ties_its_weights() -> None:
    torch.manual_seed(0)
    model = GPT(50, context=8)
    assert model.head.weight is model.token_embed.weight
    assert GPT(50, tie_weights=False).head.weight is not model.token_embed.weight
    tokens = torch.randint(50, (8, 8))
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(torch.log(torch.tensor(50.0)).item(), abs=0.2)


def test_gan_plays_both_parts_through_forward() -> None:
    model = GAN(in_channels=1, image_size=16, latent_dim=4, width=8)
    images = model(torch.randn(3, 4), part="generator")
    assert images.shape == (3, 1, 16, 16)
    assert images.abs().max() <= 1
    model(images.detach()).sum().backward()
    touched = {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None}
    assert touched == {"discriminator"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: ViT(10, image_size=18), "patch_size=4", id="patches"),
        pytest.param(lambda: ViT(10, heads=5), "model.heads=5", id="heads"),
        pytest.param(lambda: ViT(10, depth=1)(torch.zeros(1, 1, 8, 8)), "8x8.*16x16", id="image"),
        pytest.param(
            lambda: GPT(9, context=4)(torch.zeros(1, 5).long()), "context is 4", id="long"
        ),
        pytest.param(lambda: GAN(image_size=18), "multiple of 4", id="gan"),
    ],
)
def test_what_does_not_fit_is_said(make: Callable[[], object], words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        make()
