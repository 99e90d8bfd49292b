"""Compiled, pruned or trained for 8 bits: over several processes as in one."""

import shutil

import pytest
import torch
from torch import nn

from callbacks.compression.pruning import Pruning
from callbacks.compression.qat import QuantizationAwareTraining
from callbacks.ema import EMA
from toys import blocks, in_group, loaders
from trainer.options import TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


class Network(nn.Module):
    """A model without a length, as most are and nn.Sequential is not."""

    def __init__(self):
        super().__init__()
        self.blocks = blocks()

    def forward(self, x):
        return self.blocks(x)


def make_trainer(strategy, model=blocks, callbacks=None, compiling=None, **options):
    torch.manual_seed(0)
    model = strategy.prepare(model().double())
    return Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        *loaders(strategy.group),
        strategy=strategy,
        precision="fp64",
        callbacks=callbacks or {},
        options=TrainerOptions(max_epochs=2, log_every_n_steps=1, **options),
        compiled=torch.compile(model, **compiling) if compiling else None,
    )


def train(strategy, **compiling):
    """Train two epochs with a short last batch, compiled if there are options for it.

    Return weights, metrics and the number of graphs.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = make_trainer(strategy, Network, compiling=compiling)
    trainer.fit()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    weights = dict(strategy.gather_tensors(trainer.model.state_dict()))
    return {name: value.clone() for name, value in weights.items()}, trainer.metrics, graphs


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
        assert plain[2] == 0
        assert compiled[2] > 0
        for name, value in plain[0].items():
            torch.testing.assert_close(compiled[0][name], value, rtol=0, atol=1e-10)
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert compiled[1][name] == pytest.approx(plain[1][name], abs=1e-10)


def prune(strategy, **compiling):
    """Return weights, average and masks after two epochs of gradual pruning."""
    head = {"match": "^2", "method": "random", "kind": "matrix"}
    pruning = Pruning(
        {"head": head, "all": {"kind": "matrix"}}, start_step=1, end_step=5, every_n_steps=2
    )
    callbacks = {"pruning": pruning, "ema": EMA(0.9)}
    trainer = make_trainer(strategy, blocks, callbacks, compiling, clip_grad_norm=0.3)
    trainer.fit()
    average = callbacks["ema"].state_dict()["model"]
    masks = pruning.state_dict()["pruned"]
    return dict(trainer.model.state_dict()), dict(average), dict(masks)


def test_processes_and_compilers_prune_alike(ranks):
    def both(strategy):
        return prune(strategy), prune(strategy, backend="aot_eager")

    weights, average, masks = prune(Strategy("cpu"))
    assert sum(int(m.sum()) for m in masks.values()) == 14 + 81
    for results in ranks(2, in_group(both), patience=120):
        for found in results:
            assert all(torch.equal(found[2][name], mask) for name, mask in masks.items())
            for name, value in weights.items():
                torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-10)
                torch.testing.assert_close(found[1][name], average[name], rtol=0, atol=1e-10)
            for name, mask in masks.items():
                assert (found[0][name][mask] == 0).all()
                assert (found[1][name][mask] == 0).all()


def quantize(strategy, **compiling):
    """Return weights and ranges after two epochs."""
    qat = QuantizationAwareTraining(start_step=2)
    trainer = make_trainer(strategy, blocks, {"qat": qat}, compiling)
    trainer.fit()
    state = qat.state_dict()["fake_quantization"]
    return dict(trainer.model.state_dict()), torch.stack([state["low"], state["high"]])


def test_processes_and_compilers_round_alike(ranks):
    weights, ranges = quantize(Strategy("cpu"))
    assert (ranges[1] > 0).all()
    compiled = quantize(Strategy("cpu"), backend="aot_eager")
    for found in (*ranks(2, in_group(quantize), patience=120), compiled):
        torch.testing.assert_close(found[1], ranges, rtol=0, atol=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-5)
