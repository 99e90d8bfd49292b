"""A compiled model trains over several processes as one that is not compiled."""

import shutil

import pytest
import torch
from torch import nn

from toy_blocks import blocks, loaders
from trainer.options import TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.replicas import Processes
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


class Network(nn.Module):
    """A model without a length, as most are and nn.Sequential is not."""

    def __init__(self):
        super().__init__()
        self.blocks = blocks()

    def forward(self, x):
        return self.blocks(x)


def train(strategy, **options):
    """Train two epochs with a short last batch, compiled if there are options for it.

    Return weights, metrics and the number of graphs.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = strategy.prepare(Network().double())
    trainer = Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        *loaders(strategy.group),
        strategy=strategy,
        precision="fp64",
        options=TrainerOptions(max_epochs=2, log_every_n_steps=1),
        compiled=torch.compile(model, **options) if options else None,
    )
    trainer.fit()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    weights = {name: value.clone() for name, value in strategy.model_state(model).items()}
    return weights, trainer.metrics, graphs


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

    def both(rank):
        strategy = kind(Processes("gloo", 60, "cpu"), **options)
        strategy.setup()
        plain, compiled = train(strategy), train(strategy, **how)
        strategy.group.leave()
        return plain, compiled

    for plain, compiled in ranks(2, both, patience=120):
        assert plain[2] == 0
        assert compiled[2] > 0
        for name, value in plain[0].items():
            torch.testing.assert_close(compiled[0][name], value, rtol=0, atol=1e-10)
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert compiled[1][name] == pytest.approx(plain[1][name], abs=1e-10)


def test_gradients_leave_while_others_are_computed(ranks):
    """Torch cuts what is compiled within DDP at its buckets; of one graph all would come at once.

    Compiled around DDP, a model of torch's own modules would not be compiled at all.
    """

    def graphs(rank):
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 100  # of this process: a small model's
        strategy = DDP(Processes("gloo", 60, "cpu"), bucket_cap_mb=0.0005)
        strategy.setup()
        backward = []

        def backend(graph, inputs):
            backward.append(torch.is_grad_enabled())
            return graph.forward

        _, _, graphs = train(strategy, backend=backend)
        strategy.group.leave()
        return graphs, backward.count(True), backward.count(False)

    for whole, trained, evaluated in ranks(2, graphs):
        assert whole > evaluated > 0
        assert trained > 2 * evaluated  # pieces of the model; evaluation's is one
