"""Compiled, pruned or trained for 8 bits: over several processes as in one."""

import shutil
from typing import NamedTuple

import pytest
import torch
from torch import nn

from regimen.callbacks.compression.pruning import Pruning
from regimen.callbacks.compression.qat import QuantizationAwareTraining
from regimen.callbacks.ema import EMA
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from toys import blocks, in_group, loaders, trainer_of


class Network(nn.Module):
    """A model without a length, as most are and nn.Sequential is not."""

    def __init__(self):
        super().__init__()
        self.blocks = blocks()

    def forward(self, x):
        return self.blocks(x)


def make_trainer(strategy, model=blocks, callbacks=None, compiling=None, **options):
    torch.manual_seed(0)
    data, val = loaders(strategy.group)
    return trainer_of(
        Classification(3),
        data,
        model=model().double(),
        val=val,
        strategy=strategy,
        callbacks=callbacks or {},
        compiling=compiling,
        log_every_n_steps=1,
        **options,
    )


class Trained(NamedTuple):
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]
    graphs: int  # how many were compiled


def train(strategy, **compiling):
    """Train two epochs with a short last batch, compiled if there are options for it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = make_trainer(strategy, Network, compiling=compiling)
    trainer.fit()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    whole = strategy.group.broadcast(strategy.gather_tensors(trainer.model.state_dict()))
    weights = {name: value.clone() for name, value in whole.items()}
    return Trained(weights, trainer.metrics, graphs)


# Inductor writes C++ for a CPU. A kernel takes g++ two seconds: one for all sizes of a batch.
INDUCTOR = pytest.param(
    {"backend": "inductor", "dynamic": True},
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    ],
    id="inductor",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """What one test compiled another need not compile again."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("how", [pytest.param({"backend": "aot_eager"}, id="aot_eager"), INDUCTOR])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(DDP, {}, id="ddp"),
        pytest.param(FSDP, {"wrap_modules": ["Block"]}, id="fsdp"),
    ],
)
def test_a_compiled_model_trains_as_any(ranks, kind, options, how, kernels, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool outlives the processes

    def both(strategy):
        return train(strategy), train(strategy, **how)

    for plain, compiled in ranks(2, in_group(both, kind, **options), patience=120):
        assert plain.graphs == 0
        assert compiled.graphs > 0
        for name, value in plain.weights.items():
            torch.testing.assert_close(compiled.weights[name], value, rtol=0, atol=1e-10)
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert compiled.metrics[name] == pytest.approx(plain.metrics[name], abs=1e-10)


def prune(strategy, **compiling):
    """Return weights, average and masks after two epochs of gradual pruning."""
    rules = {
        "head": {"match": "^2", "method": "random", "kind": "matrix"},
        "all": {"kind": "matrix"},
    }
    pruning = Pruning(rules=rules, start_step=1, end_step=5, every_n_steps=2)
    ema = EMA(0.9)
    callbacks = {"pruning": pruning, "ema": ema}
    trainer = make_trainer(strategy, blocks, callbacks, compiling, clip_grad_norm=0.3)
    trainer.fit()
    weights = dict(trainer.model.state_dict())
    average = dict(ema.state_dict()["model"])
    masks = dict(pruning.state_dict()["pruned"])
    return weights, average, masks


def quantize(strategy, **compiling):
    """Return weights and ranges after two epochs."""
    qat = QuantizationAwareTraining(start_step=2)
    trainer = make_trainer(strategy, blocks, {"qat": qat}, compiling)
    trainer.fit()
    state = qat.state_dict()["fake_quantization"]
    return dict(trainer.model.state_dict()), {"low": state["low"], "high": state["high"]}


def assert_alike(ranks, compress, expected, tolerance):
    """Compare what two processes find, plain and compiled, with what one does."""

    def both(strategy):
        return compress(strategy), compress(strategy, backend="aot_eager")

    for plain, compiled in ranks(2, in_group(both), patience=120):
        for found in (plain, compiled):
            for part, expected_part in zip(found, expected, strict=True):
                for name, value in expected_part.items():
                    torch.testing.assert_close(part[name], value, rtol=0, atol=tolerance)


def test_processes_and_compilers_prune_alike(ranks):
    alone = prune(Strategy("cpu"))
    assert_alike(ranks, prune, alone, 1e-10)

    weights, _, masks = alone
    assert sum(int(mask.sum()) for mask in masks.values()) == 14 + 81
    for name, mask in masks.items():
        assert (weights[name][mask] == 0).all()


@pytest.mark.slow
def test_processes_and_compilers_quantize_alike(ranks):
    alone = quantize(Strategy("cpu"))
    assert_alike(ranks, quantize, alone, 1e-5)

    _, ranges = alone
    assert (ranges["high"] > 0).all()
