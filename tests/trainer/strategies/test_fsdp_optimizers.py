"""Every shipped optimizer, built as for GPUs, trains shards as it trains the whole."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from conf.check import parse
from conf.errors import ConfigError
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from toy_blocks import in_group
from trainer.assembly.check import check_targets
from trainer.optimizers.optimizers import build_optimizers
from trainer.optimizers.param_groups import ParamGroupError
from trainer.strategies.fsdp import FSDP

CONF = Path(__file__).parents[3] / "conf" / "optimizer"
SHIPPED = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*.yaml"))}
REFUSED = ("adafactor",)
OPTIMIZERS = {
    name: {key: value for key, value in node.items() if key != "defaults"}
    for name, node in SHIPPED.items()
}
UPDATES = 3


def network(name=""):
    torch.manual_seed(0)
    width, classes = (8, 4) if name == "lbfgs" else (5, 3)  # 5 and 3 rows make uneven shards
    first, last = nn.Linear(6, width), nn.Linear(width, classes)
    parts = [("generator", first), ("act", nn.Tanh()), ("discriminator", last)]
    return nn.Sequential(OrderedDict(parts)).double()


def train(model, node, prefer_fused=False):
    """Step on all samples at once; return the weights, whole."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8,), generator=generator)
    optimizers = build_optimizers(model, node, prefer_fused=prefer_fused)

    def evaluate():
        optimizers.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(UPDATES):
        for optimizer in optimizers.optimizers.values():
            optimizer.step(evaluate)
    fused = {n: o.defaults.get("fused") for n, o in optimizers.items()}
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole], fused


def test_shards_are_trained_as_the_whole(ranks):
    names = [name for name in OPTIMIZERS if name not in REFUSED]
    assert "sgd" in names

    def run(strategy):
        return {n: train(strategy.prepare(network(n)), OPTIMIZERS[n], True) for n in names}

    for results in ranks(2, in_group(run, FSDP)):
        for name, (weights, fused) in results.items():
            # Muon makes its step orthogonal in bfloat16.
            tolerance = 1e-3 if name == "muon" else 1e-10
            for value, other in zip(
                weights, train(network(name), OPTIMIZERS[name])[0], strict=True
            ):
                torch.testing.assert_close(value, other, rtol=0, atol=tolerance)
            assert fused.get("adamw" if name == "muon" else "optimizer", True) is (
                True if name in ("adam", "adamw", "muon", "gan") else None
            )


def test_what_torch_does_not_shard_is_refused(ranks):
    def run(strategy):
        with pytest.raises(ParamGroupError, match=r"LBFGS .* generator\.weight, discriminator"):
            build_optimizers(strategy.prepare(network()), OPTIMIZERS["lbfgs"])
        with pytest.raises(ParamGroupError, match=r"optimizer\.fused: .* SGD for strategy=fsdp"):
            build_optimizers(strategy.prepare(network()), {**OPTIMIZERS["sgd"], "fused": True})

    ranks(2, in_group(run, FSDP))


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_parameters_is_refused_in_the_checks(name):
    def check(strategy):
        composed = compose(parse_arguments([f"optimizer={name}", f"strategy={strategy}"]))
        check_targets(parse(composed.config))

    check("ddp")
    with pytest.raises(ConfigError, match=r"optimizer\._target_: .* strategy=fsdp shards"):
        check("fsdp")
