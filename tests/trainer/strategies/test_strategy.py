"""However many processes and micro-batches: the same training (I1, I3) and evaluation (I4)."""

import os
from functools import partial

import pytest
import torch
from torch import nn

import toys
from regimen.callbacks.unfreeze import Unfreeze
from regimen.trainer.callback import Callback
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.losses import vector
from regimen.trainer.tasks.metrics import MacroF1
from toys import Log, in_group, loaders, trainer_of

FEATURES = 9
CLASSES = 3


def make_trainer(
    strategy,
    accumulation=1,
    task=None,
    optimizer=None,
    batchnorm=False,
    callbacks=None,
    **options,
):
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if batchnorm else []
    # A bias in front of a BatchNorm has no gradient but rounding, which AdamW makes a step of.
    first = nn.Linear(FEATURES, 8, bias=not batchnorm)
    model = nn.Sequential(first, *norm, nn.Tanh(), nn.Linear(8, CLASSES)).double()
    data, val = loaders(strategy.group, accumulation)
    return trainer_of(
        task or Classification(CLASSES, nn.CrossEntropyLoss(label_smoothing=0.1)),
        data,
        model=model,
        make=optimizer or partial(torch.optim.AdamW, lr=0.05),
        val=val,
        strategy=strategy,
        callbacks={"log": Log(), **(callbacks or {})},
        log_every_n_steps=1,
        **options,
    )


def outcome(trainer):
    """Train, and return the weights and everything logged."""
    trainer.fit()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return weights, trainer.callbacks["log"].lines


def assert_same(one, other, tolerance=1e-10):
    weights, lines = one
    other_weights, other_lines = other
    for name, value in weights.items():
        torch.testing.assert_close(other_weights[name], value, rtol=0, atol=tolerance)
    assert [step for step, _ in lines] == [step for step, _ in other_lines]
    for (_, scalars), (_, others) in zip(lines, other_lines, strict=True):
        assert others == pytest.approx(scalars, rel=0, abs=tolerance)


def apart(function):
    """Let `function(strategy)` run as if each process had a machine of its own."""

    def run(rank):
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        return in_group(function)(rank)

    return run


# A loss whose weights depend on the data: sample counts would make the wrong mean.
WEIGHTED = Classification(CLASSES, nn.CrossEntropyLoss(weight=vector([1, 2, 3])))
TASKS = {
    "mean": None,
    "weighted": WEIGHTED,
    "clipped": None,
    "closure": None,
}
OPTIONS = {
    "clipped": {"clip_grad_norm": 0.05},
    "closure": {"optimizer": partial(torch.optim.LBFGS, lr=0.1, max_iter=3)},
}


def case(name, strategy, accumulation=1):
    options = OPTIONS.get(name, {})
    return outcome(make_trainer(strategy, accumulation, TASKS[name], **options))


@pytest.fixture(scope="module")
def alone():
    return {name: case(name, Strategy("cpu")) for name in TASKS}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes_and_micro_batches_change_nothing(alone, ranks, world_size):
    def train(strategy):
        return {(n, a): case(n, strategy, a) for n in TASKS for a in (1, 2, 3)}

    for results in ranks(world_size, in_group(train)):
        for (name, _), result in results.items():
            assert_same(alone[name], result)


def test_a_wrong_mean_would_be_noticed(alone, ranks):
    def train(strategy):
        strategy.gradient_scale = 1.0
        return case("mean", strategy)

    for result in ranks(2, in_group(train)):
        with pytest.raises(AssertionError):
            assert_same(alone["mean"], result)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_evaluation_counts_each_sample_once(ranks, world_size):
    def evaluate(strategy):
        task = Classification(3, metrics={"f1": MacroF1(3)})
        trainer = make_trainer(strategy, task=task, batchnorm=True)  # which waits for nobody here
        batch = 4 * strategy.group.world_size
        loaders = (
            toys.loader(toys.points(n, 9), 1, batch, False, strategy)
            for n in (1, 2, 10)  # fewer samples than processes, too
        )
        return [trainer.evaluate(loader, "val") for loader in loaders]

    expected = evaluate(Strategy("cpu"))
    for found in ranks(world_size, in_group(evaluate, sync_batchnorm=True)):
        for metrics, other in zip(found, expected, strict=True):
            assert metrics == pytest.approx(other, rel=1e-14)


def test_all_processes_evaluate_the_buffers_that_are_saved(ranks):
    def evaluate(strategy):
        model = strategy.prepare(nn.BatchNorm1d(2))
        model.running_mean.fill_(strategy.group.rank)
        with strategy.evaluating(model):
            within = model.running_mean.tolist()
        return within, model.running_mean.tolist()

    results = ranks(2, in_group(evaluate))
    assert results == [([0, 0], [rank, rank]) for rank in range(2)]


class StopSome(Callback):
    """Some of the processes ask for a stop, or hear of a signal, after one update."""

    def __init__(self, step, ranks, signal=None):
        self.step = step
        self.ranks = ranks
        self.signal = signal

    def on_update_end(self, trainer):
        if trainer.state.updates == self.step and trainer.group.rank in self.ranks:
            if self.signal:
                trainer.state.signal = self.signal
            else:
                trainer.state.request_stop(f"rank {trainer.group.rank}")


def stopped_by(callback, strategy):
    trainer = make_trainer(strategy, callbacks={"stop": callback})
    trainer.fit()
    return trainer.state.updates, trainer.state.stop_reason, trainer.state.stop_code


@pytest.mark.parametrize("place", [in_group, apart])
@pytest.mark.parametrize(
    ("step", "stopped"),
    [
        pytest.param(4, 5, id="the others learn of it by the next update"),
        pytest.param(6, 6, id="all meet at the end of an epoch"),
    ],
)
def test_a_signal_to_one_process_stops_all_at_the_same_update(ranks, step, stopped, place):
    train = partial(stopped_by, StopSome(step, [1], ("SIGTERM", 143)))
    assert ranks(3, place(train)) == [(stopped, "SIGTERM", 143)] * 3


@pytest.mark.parametrize("place", [in_group, apart])
def test_what_all_processes_ask_for_happens_at_once(ranks, place):
    """As it does in one process: the training must not depend on their number."""
    assert stopped_by(StopSome(4, [0]), Strategy("cpu")) == (4, "rank 0", 0)

    def train(strategy):
        return [stopped_by(StopSome(4, asking), strategy) for asking in ([0, 1, 2], [1, 2])]

    assert ranks(3, place(train)) == [[(4, "rank 0", 0), (5, "rank 1", 0)]] * 3


def test_a_verdict_of_one_process_is_the_verdict_of_all(ranks):
    class Stop(Callback):
        def on_validation_end(self, trainer, metrics):
            if trainer.group.rank == 2:
                trainer.state.request_stop("enough")

    # At the end of the first epoch.
    assert ranks(3, in_group(partial(stopped_by, Stop()))) == [(3, "enough", 0)] * 3


def test_one_process_of_a_machine_prepares_the_data(ranks, tmp_path):
    def prepare(strategy):
        with strategy.group.one_per_node():
            found = (tmp_path / "data").exists()
            (tmp_path / "data").touch()
        return found

    assert ranks(3, in_group(prepare)) == [False, True, True]


POWERSGD = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
DDP_OPTIONS = [
    {"comm_hook": "bf16_compress"},
    {"comm_hook": "fp16_compress"},
    {"gradient_as_bucket_view": False, "comm_hook_options": POWERSGD, "comm_hook": "powersgd"},
    {"static_graph": True},
    {"bucket_cap_mb": 0.001},
    {"broadcast_buffers": False},
    {"find_unused_parameters": True},
]


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_options_of_ddp(alone, ranks, options):
    one, other = ranks(2, in_group(partial(case, "mean"), **options))
    assert_same(one, other, tolerance=0)  # whatever is lost on the way, all lose the same
    tolerance = {"bf16_compress": 0.2, "fp16_compress": 0.02, "powersgd": 2.0}
    assert_same(alone["mean"], one, tolerance.get(options.get("comm_hook"), 1e-10))


def with_batchnorm(strategy):
    return outcome(make_trainer(strategy, batchnorm=True))


@pytest.mark.parametrize("world_size", [2, 4])
def test_batchnorm_over_all_processes_is_that_of_one(ranks, world_size):
    """The last update's 3 samples leave one of 4 processes without any."""
    alone = with_batchnorm(Strategy("cpu"))
    for result in ranks(world_size, in_group(with_batchnorm, sync_batchnorm=True)):
        assert_same(alone, result)
    with pytest.raises(AssertionError):
        assert_same(alone, ranks(world_size, in_group(with_batchnorm))[0])


def unfrozen(strategy):
    callbacks = {"unfreeze": Unfreeze({"first": {"pattern": "0.*", "step": 3}})}
    return outcome(make_trainer(strategy, callbacks=callbacks))


@pytest.mark.parametrize("written", [None, True])
def test_what_a_callback_freezes_is_looked_for(ranks, written):
    alone = unfrozen(Strategy("cpu"))
    for result in ranks(2, in_group(unfrozen, find_unused_parameters=written)):
        assert_same(alone, result)
