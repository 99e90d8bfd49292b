"""Any number of processes skip the same updates."""

import pytest
import torch
from torch import Tensor, nn

from toys import in_group, loader, points
from trainer.errors import DivergedError
from trainer.options import TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

SAMPLES, BATCH, BAD = 21, 4, 9  # the last update has one sample: one of two processes borrows it


class Network(nn.Module):
    """Logits, of which one class more says that the loss is infinite."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        infinite = torch.where(x[:, :1] > 50, torch.inf, 0.0).to(x)
        return torch.cat([self.layer(x), infinite], 1)


class Infinite(nn.Module):
    """An infinite value whose gradient is finite: it is added."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[:, :3], target) + output[:, 3].mean()


def train(strategy, on_nonfinite="skip", accumulation=1):
    """Train an epoch; return the weights, the counters and what it ended with."""
    torch.manual_seed(0)
    model = strategy.prepare(Network().double())
    data = points(SAMPLES)
    data.x[BAD, 0] = 100.0  # the loss does not like it
    trainer = Trainer(
        model,
        Classification(4, Infinite(), metrics={}),
        torch.optim.AdamW(model.parameters(), lr=0.05),
        loader(data, accumulation, BATCH, shuffled=False, strategy=strategy),
        strategy=strategy,
        precision="fp64",
        options=TrainerOptions(max_epochs=1, on_nonfinite=on_nonfinite, log_every_n_steps=1),
    )
    error = ""
    try:
        trainer.fit()
    except DivergedError as caught:
        error = str(caught)
    weights = strategy.gather_tensors({n: p.detach() for n, p in model.named_parameters()})
    counters = trainer.state.state_dict()
    del counters["micro_batches"]
    return {n: w.clone() for n, w in weights.items()}, counters, error


CASES = [("skip", 1), ("skip", 2), ("stop", 1)]


@pytest.fixture(scope="module")
def alone():
    return {case: train(Strategy("cpu"), *case) for case in CASES}


def test_one_process_skips_the_update(alone):
    for case in CASES[:2]:
        weights, counters, _ = alone[case]
        assert (counters["global_step"], counters["skipped_updates"]) == (5, 1)
        assert all(torch.isfinite(w).all() for w in weights.values())
    assert "the loss is not finite, at update 3" in alone["stop", 1][2]


@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_several_processes_skip_the_same_updates(alone, ranks, kind):
    def run(strategy):
        return {case: train(strategy, *case) for case in CASES}

    for results in ranks(2, in_group(run, kind)):
        for case, (weights, counters, error) in results.items():
            assert counters == alone[case][1]
            assert error[:40] == alone[case][2][:40]
            for name, weight in weights.items():
                torch.testing.assert_close(weight, alone[case][0][name], rtol=0, atol=1e-10)
