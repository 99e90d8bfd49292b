"""The network of the airbench recipes: shapes, what is trained, and its optimizer written out."""

import pytest
import torch
from torch import nn

from conf.check import parse
from models.airbench import Airbench
from scripts.composition.compose import compose
from trainer.optimizers.optimizers import build_optimizers


@pytest.mark.parametrize(
    ("channels", "side"),
    [
        pytest.param(3, 32, id="cifar"),
        pytest.param(1, 16, id="digits"),
        pytest.param(3, 40, id="larger"),
    ],
)
def test_logits_and_gradients(channels: int, side: int) -> None:
    model = Airbench(10, channels, widths=(8, 16, 16))
    out = model(torch.randn(4, channels, side, side))
    assert out.shape == (4, 10)
    out.square().sum().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    norms = {f"groups.{g}.norm{n}.weight" for g in range(3) for n in (1, 2)}
    assert idle == {"whiten.weight", *norms}
    assert idle == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_convolutions_begin_by_handing_on_their_input() -> None:
    layer = Airbench(10, widths=(32, 64, 64)).groups[1].conv1  # type: ignore[union-attr]
    assert isinstance(layer, nn.Conv2d)
    images = torch.randn(2, 32, 8, 8)
    torch.testing.assert_close(layer(images)[:, :32], images)


def test_all_is_trained_by_one_optimizer_or_the_other() -> None:
    config = parse(compose(["experiment=airbench94"]).config)
    model = Airbench(10, widths=(8, 16, 16))
    optimizers = build_optimizers(model, config.optimizer)
    groups = {
        group.name: ({optimizers.names[p] for p in group.options["params"]}, group.options["lr"])
        for group in optimizers.groups()
    }
    kernels = {f"groups.{g}.conv{n}.weight" for g in range(3) for n in (1, 2)}
    biases = {f"groups.{g}.norm{n}.bias" for g in range(3) for n in (1, 2)}
    assert groups == {
        "muon": (kernels, 0.24),
        "sgd.head": ({"head.weight"}, 1340.0),
        "sgd": ({"whiten.bias", *biases}, 106.0),
    }
