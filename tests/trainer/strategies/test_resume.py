"""A group goes on where it was: bit by bit with as many processes, in order with any other."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import toys
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from toys import Log, StopAt, differences, through_a_file

STOP, UPDATES = 5, 9  # of 4 updates an epoch


class Points(toys.Samples):
    """Random samples; the data set knows which were asked for."""

    def __init__(self):
        data = toys.points(46, 20, dtype=torch.float32)
        super().__init__(data.x, data.y)
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


def make_trainer(strategy, stop=None, dtype="fp32", dropout=0.3):
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(dropout)]
    if not dropout:
        del layers[2:]
    model = nn.Sequential(*layers, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    torch.manual_seed(strategy.group.rank)
    return toys.trainer_of(
        Classification(3),
        toys.loader(Points(), batch=12, strategy=strategy),
        model=model.double() if dtype == "fp64" else model,
        strategy=strategy,
        precision=dtype,
        callbacks={"log": Log(), "stop": StopAt(stop)},
        max_epochs=None,
        max_steps=UPDATES,
        log_every_n_steps=3,
    )


def outcome(trainer):
    """Return every bit that must be as in a run that was not interrupted."""
    parts = trainer.model.state_dict(), trainer.optimizers.state_dict(), torch.get_rng_state()
    return copy.deepcopy([*parts, trainer.callbacks["log"].lines])


def interrupted(strategy, warm_up=True):
    """Return how a run that was stopped in the middle ends in another state than the whole."""
    whole = make_trainer(strategy)
    whole.fit()
    expected = outcome(whole)
    first = make_trainer(strategy, STOP)
    first.fit()
    payload = through_a_file(first.state_dict())
    second = make_trainer(strategy)
    if not warm_up:
        second.strategy.warm_up = lambda wrapped, compute: None
    second.load_state_dict(payload)
    second.callbacks["log"].lines = list(first.callbacks["log"].lines)
    second.fit()
    return differences(expected, outcome(second))


in_group = partial(toys.in_group, bucket_cap_mb=0.004)


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {"broadcast_buffers": False}), (3, {}), (4, {})]
)
def test_a_resume_is_exact(ranks, world_size, options):
    assert ranks(world_size, in_group(interrupted, **options)) == [[]] * world_size


def test_without_a_warm_up_processes_differ(ranks):
    assert all(ranks(3, in_group(partial(interrupted, warm_up=False))))


def part(strategy, content=None, stop=None):
    """Train a part of a run in float64; return samples by update, weights and a checkpoint."""
    trainer = make_trainer(strategy, stop, "fp64", dropout=0)
    notes = trainer.load_state_dict(content) if content else []
    trainer.train_loader.dataset.seen.clear()  # of the warm-up
    trainer.fit()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    return trainer.train_loader.dataset.seen, weights, through_a_file(trainer.state_dict()), notes


@pytest.fixture(scope="module")
def whole():
    return part(Strategy("cpu"))


@pytest.mark.parametrize("after", [1, 3, 4])
def test_another_number_of_processes_goes_on(ranks, whole, after):
    first = ranks(2, in_group(lambda strategy: part(strategy, stop=STOP)))
    content = first[0][2]
    second = ranks(after, in_group(lambda strategy: part(strategy, content)))
    assert any("saved by 2 processes" in note for note in second[0][3])
    # Every sample of every update, and none twice: a rank without one (of 10 samples) borrows.
    seen = Counter(index for parts in (first, second) for rank in parts for index in rank[0])
    assert seen == Counter(whole[0])
    for _, weights, _, _ in second:
        for value, expected in zip(weights, whole[1], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
