"""Training for 8 bits is the same for any number of processes and micro-batches."""

import pytest
import torch

from callbacks.compression.qat import QuantizationAwareTraining
from callbacks.support.errors import CallbackError
from toy_blocks import blocks, loaders
from trainer.options import TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Planned, Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


def prepared(strategy, **compiling):
    torch.manual_seed(0)
    model = strategy.prepare(blocks().double())
    return Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        *loaders(strategy.group),
        strategy=strategy,
        precision="fp64",
        callbacks={"qat": QuantizationAwareTraining(start_step=2)},
        options=TrainerOptions(max_epochs=2, log_every_n_steps=1),
        compiled=torch.compile(model, **compiling) if compiling else None,
    )


def train(strategy, **compiling):
    """Return weights and ranges after two epochs."""
    trainer = prepared(strategy, **compiling)
    trainer.fit()
    state = trainer.callbacks["qat"].state_dict()["fake_quantization"]
    return dict(trainer.model.state_dict()), torch.stack([state["low"], state["high"]])


def test_processes_and_compilers_round_alike(ranks):
    def one(rank):
        strategy = DDP(Processes("gloo", 60, "cpu"))
        strategy.setup()
        result = train(strategy)
        strategy.group.leave()
        return result

    weights, ranges = train(Strategy("cpu"))
    assert (ranges[1] > 0).all()
    for found in (*ranks(2, one, patience=120), train(Strategy("cpu"), backend="aot_eager")):
        torch.testing.assert_close(found[1], ranges, rtol=0, atol=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-5)


def test_shards_and_threads_are_refused():
    trainer = prepared(Strategy("cpu"))
    trainer.strategy = Planned("dp", 2, torch.device("cpu"))
    with pytest.raises(CallbackError, match="strategy=ddp"):
        trainer.setup()
