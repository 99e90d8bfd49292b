"""A group goes on where it was: bit by bit with as many processes, in order with any other."""

import io
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import toys
from data.loading.loader import Loader
from data.orders import Shuffled
from data.updates import UpdateSampler
from trainer import rng, snapshot
from trainer.callback import Callback
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

STOP, UPDATES = 5, 9  # of 4 updates an epoch
POWERSGD = {"comm_hook": "powersgd", "comm_hook_options": {"start_powerSGD_iter": 2}}


class Points:
    """Random samples; the data set knows which were asked for."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(46, 20, generator=generator)
        self.labels = torch.randint(3, (46,), generator=generator)
        self.seen = []

    def __len__(self):
        return 46

    def __getitem__(self, index):
        self.seen.append(index)
        return self.inputs[index], self.labels[index]


class Watch(Callback):
    """Keep the log, and ask for a stop after an update."""

    def __init__(self, stop):
        self.stop, self.lines = stop, []

    def on_log(self, trainer, scalars):
        self.lines.append((trainer.state.global_step, dict(scalars)))

    def on_update_end(self, trainer):
        if trainer.state.updates == self.stop:
            trainer.state.request_stop("SIGTERM", 143)


def make_trainer(strategy, stop=None, dtype="fp32", dropout=0.3):
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(dropout)]
    if not dropout:
        del layers[2:]
    model = nn.Sequential(*layers, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    model = strategy.prepare(model.double() if dtype == "fp64" else model)
    sampler = UpdateSampler(
        Shuffled(46, seed=1),
        batch_size=12,
        rank=strategy.group.rank,
        world_size=strategy.group.world_size,
    )
    torch.manual_seed(strategy.group.rank)
    return Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        Loader(Points(), sampler, seed=0),
        strategy=strategy,
        precision=dtype,
        callbacks={"watch": Watch(stop)},
        options=TrainerOptions(max_epochs=None, max_steps=UPDATES, log_every_n_steps=3),
    )


def saved(trainer):
    file = io.BytesIO()
    torch.save(snapshot.take(trainer), file)
    return file.getvalue()


def loaded(content):
    return torch.load(io.BytesIO(content), weights_only=True)


def outcome(trainer):
    """Return every bit that must be as in a run that was not interrupted."""
    state = {**trainer.model.state_dict()}
    for i, values in enumerate(trainer.optimizers.optimizers["optimizer"].state.values()):
        state |= {f"{i}.{k}": v for k, v in values.items() if isinstance(v, torch.Tensor)}
    content = {name: value.clone() for name, value in state.items()}
    return content, rng.capture()["torch"], trainer.callbacks["watch"].lines


def same(one, other):
    (state, random, lines), (other_state, other_random, other_lines) = one, other
    return (
        all(torch.equal(state[name], other_state[name]) for name in state)
        and torch.equal(random, other_random)
        and lines == other_lines
    )


in_group = partial(toys.in_group, bucket_cap_mb=0.004)


def interrupted(strategy, warm_up=True):
    """Train with a stop in the middle, and return the whole's and the two parts' outcome."""
    whole = make_trainer(strategy)
    whole.fit()
    expected = outcome(whole)
    first = make_trainer(strategy, STOP)
    first.fit()
    payload = loaded(saved(first))
    second = make_trainer(strategy)
    if not warm_up:
        second.strategy.warm_up = lambda wrapped, compute: None
    snapshot.restore(second, payload)
    second.callbacks["watch"].lines = list(first.callbacks["watch"].lines)
    second.fit()
    return expected, outcome(second)


@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}], ids=["", "own_buffers"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_resume_is_exact(ranks, world_size, options):
    for expected, resumed in ranks(world_size, in_group(interrupted, **options)):
        assert same(expected, resumed)


def test_without_a_warm_up_processes_differ(ranks):
    def resume(strategy):
        return interrupted(strategy, warm_up=False)

    assert not any(same(expected, resumed) for expected, resumed in ranks(3, in_group(resume)))


def test_a_warm_up_leaves_no_trace(ranks):
    def warm_up(strategy):
        trainer = make_trainer(strategy)
        before = outcome(trainer)
        snapshot._warm_up(trainer)
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        return same(before, outcome(trainer)), len(grads), trainer.state.updates

    assert ranks(3, in_group(warm_up)) == [(True, 0, 0)] * 3


def part(strategy, content=None, stop=None):
    """Train a part of a run in float64; return samples by update, weights and a checkpoint."""
    trainer = make_trainer(strategy, stop, "fp64", dropout=0)
    notes = snapshot.restore(trainer, loaded(content)) if content else []
    trainer.train_loader.dataset.seen.clear()  # of the warm-up
    trainer.fit()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    return trainer.train_loader.dataset.seen, weights, saved(trainer), notes


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


def test_a_resume_says_that_powersgd_starts_anew(ranks, caplog):
    def resume(strategy):
        with caplog.at_level("INFO", "regimen"):
            interrupted(strategy)
        return caplog.text

    for told in ranks(2, in_group(resume, **POWERSGD)):
        assert "powersgd starts anew: its state is not saved" in told
