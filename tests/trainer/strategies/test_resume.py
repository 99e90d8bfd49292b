"""A group goes on where it was: bit by bit with as many processes, in order with any other."""

import copy
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import toys
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from toys import Log, StopAt, differences, through_a_file

# An epoch has 4 updates.
STOP = 5
UPDATES = 9


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
    """Return a trainer of a network with dropout and BatchNorm, or without both."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU()]
    if dropout:
        layers += [nn.BatchNorm1d(64), nn.Dropout(dropout)]
    model = nn.Sequential(*layers, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    if dtype == "fp64":
        model = model.double()
    torch.manual_seed(strategy.group.rank)
    return toys.trainer_of(
        Classification(3),
        toys.loader(Points(), batch=12, strategy=strategy),
        model=model,
        strategy=strategy,
        precision=dtype,
        callbacks={"log": Log(), "stop": StopAt(stop)},
        max_epochs=None,
        max_steps=UPDATES,
        log_every_n_steps=3,
    )


def outcome(trainer):
    """Return every bit that must be as in a run that was not interrupted."""
    parts = [
        trainer.model.state_dict(),
        trainer.optimizers.state_dict(),
        torch.get_rng_state(),
        trainer.callbacks["log"].lines,
    ]
    return copy.deepcopy(parts)


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
    for differing in ranks(world_size, in_group(interrupted, **options)):
        assert differing == []


def test_without_a_warm_up_processes_differ(ranks):
    for differing in ranks(3, in_group(partial(interrupted, warm_up=False))):
        assert differing != []


class Part(NamedTuple):
    """A part of a run in float64."""

    seen: list[int]  # the samples in the order of the updates
    weights: list[torch.Tensor]
    checkpoint: dict[str, Any]
    notes: list[str]  # of the resume


def part(strategy, content=None, stop=None):
    """Train a part of a run, on from a checkpoint if one is given."""
    trainer = make_trainer(strategy, stop, "fp64", dropout=0)
    notes = trainer.load_state_dict(content) if content else []
    seen = trainer.train_loader.dataset.seen
    seen.clear()  # of the warm-up
    trainer.fit()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    return Part(seen, weights, through_a_file(trainer.state_dict()), notes)


@pytest.fixture(scope="module")
def whole():
    return part(Strategy("cpu"))


@pytest.mark.parametrize("after", [1, 3, 4])
def test_another_number_of_processes_goes_on(ranks, whole, after):
    first = ranks(2, in_group(lambda strategy: part(strategy, stop=STOP)))
    content = first[0].checkpoint
    second = ranks(after, in_group(lambda strategy: part(strategy, content)))

    notes = second[0].notes

    assert any("saved by 2 processes" in note for note in notes)

    # Every sample of every update, and none twice: a rank without one (of 10 samples) borrows.
    seen = Counter()
    for process in (*first, *second):
        seen.update(process.seen)
    assert seen == Counter(whole.seen)
    for process in second:
        torch.testing.assert_close(process.weights, whole.weights, rtol=0, atol=1e-10)
