"""Pruned weights are the same over several processes, and in a compiled model."""

import torch

from callbacks.compression.pruning import Pruning
from callbacks.ema import EMA
from toy_blocks import blocks, loaders
from trainer.options import Clipping, TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


def train(strategy, **compiling):
    """Return weights, average and masks after two epochs of gradual pruning."""
    torch.manual_seed(0)
    model = strategy.prepare(blocks().double())
    rules = {
        "head": {"match": "^2", "method": "random", "kind": "matrix"},
        "all": {"kind": "matrix"},
    }
    trainer = Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        *loaders(strategy.group),
        strategy=strategy,
        precision="fp64",
        callbacks={
            "pruning": Pruning(rules, start_step=1, end_step=5, every_n_steps=2),
            "ema": EMA(0.9),
        },
        options=TrainerOptions(max_epochs=2, log_every_n_steps=1, clipping=Clipping(norm=0.3)),
        compiled=torch.compile(model, **compiling) if compiling else None,
    )
    trainer.fit()
    average = trainer.callbacks["ema"].state_dict()["model"]
    masks = trainer.callbacks["pruning"].state_dict()["pruned"]
    return dict(model.state_dict()), dict(average), dict(masks)


def test_processes_and_compilers_prune_alike(ranks):
    def both(rank):
        strategy = DDP(Processes("gloo", 60, "cpu"))
        strategy.setup()
        results = train(strategy), train(strategy, backend="aot_eager")
        strategy.group.leave()
        return results

    weights, average, masks = train(Strategy("cpu"))
    assert sum(int(m.sum()) for m in masks.values()) == 14 + 81
    for plain, compiled in ranks(2, both, patience=120):
        for found in (plain, compiled):
            assert all(torch.equal(found[2][name], mask) for name, mask in masks.items())
            for name, value in weights.items():
                torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-10)
                torch.testing.assert_close(found[1][name], average[name], rtol=0, atol=1e-10)
            for name, mask in masks.items():
                assert (found[0][name][mask] == 0).all()
                assert (found[1][name][mask] == 0).all()
