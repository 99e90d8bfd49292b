"""Averages of the weights: EMA and SWA against torch's own, and what is evaluated with them."""

import copy
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.ema import EMA, RunningAverage
from regimen.callbacks.support import CallbackError
from regimen.callbacks.swa import SWA
from regimen.trainer import snapshot
from regimen.trainer.callback import Callback
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.errors import ModelError
from regimen.trainer.evaluation import evaluate


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def disturb(model):
    """Change parameters and BatchNorm's statistics, as an update does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.train()(torch.randn(5, 3, dtype=torch.float64))


def test_exchange_gives_values_and_keeps_tensors():
    model, average = make_model(), RunningAverage()
    average.begin(model)
    start = copy.deepcopy(model.state_dict())
    disturb(model)
    trained = copy.deepcopy(model.state_dict())
    places = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}

    def same(expected):
        return all(torch.equal(v, expected[n]) for n, v in model.state_dict().items())

    with suppress(RuntimeError), average.exchanged(model):
        assert same(start)
        raise RuntimeError("in between")
    assert same(trained)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == places
    loaded, under_way = RunningAverage(), RunningAverage()
    under_way.begin(model)
    for target in (loaded, under_way):
        target.load_state_dict(average.state_dict())
        with target.exchanged(model):
            assert same(start)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_tied_weights_move_once_and_keep_both_names():
    model, average, loaded = Tied(), RunningAverage(), RunningAverage()
    average.begin(model)
    with torch.no_grad():
        model.first.weight.zero_()
    start = average.tensors()["first.weight"].clone()
    average.update(get_ema_multi_avg_fn(1 - 0.5))
    state = average.tensors()
    assert state.keys() == {"first.weight", "second.weight"}
    assert torch.equal(state["first.weight"], start / 2)
    loaded.load_state_dict({"model": {name: value.clone() for name, value in state.items()}})
    loaded.begin(model)
    loaded.update(get_ema_multi_avg_fn(1 - 0.5))
    assert torch.equal(loaded.tensors()["second.weight"], start / 4)


class History(Callback):
    """Remember the model after every update."""

    def __init__(self):
        self.states = []

    def on_fit_start(self, trainer):
        self.states.append(copy.deepcopy(trainer.model.state_dict()))

    on_update_end = on_fit_start


PLAIN = {"decay": 0.8, "warmup": False}
WARMUP = {step: min(0.4, (1 + step) / (10 + step)) for step in (2, 4, 6, 8, 10)}


@pytest.mark.parametrize(
    ("options", "decays", "spoilt"),
    [
        pytest.param(PLAIN, dict.fromkeys(range(1, 11), 0.8), None, id="plain"),
        pytest.param({"decay": 0.4, "update_every": 2}, WARMUP, None, id="warmup, every second"),
        pytest.param(
            {**PLAIN, "start_epoch": 1},
            {5: 0.0, **dict.fromkeys(range(6, 11), 0.8)},
            None,
            id="copied in the first epoch",
        ),
        pytest.param(
            {"decay": 0.98, "warmup": False, "update_every": 2, "batch_size": 6, "epochs": 2},
            dict.fromkeys((2, 4, 6, 8, 10), 1 - 0.02 * 6 * 2 / 2),
            None,
            id="for batch and epochs",
        ),
        pytest.param(
            {"decay": 0.5, "warmup": False, "batch_size": 6, "epochs": 1},
            {10: 0.0},
            None,
            id="less than none",
        ),
        pytest.param(PLAIN, dict.fromkeys((1, 2, 4, 5, 6, 7, 9, 10), 0.8), 2, id="skipped"),
    ],
)
def test_an_ema_is_the_average_written_out_by_hand(make_trainer, options, decays, spoilt):
    history, ema = History(), EMA(**options)
    callbacks = {"history": history, "ema": ema}
    make_trainer(callbacks, spoilt=spoilt, on_nonfinite="skip").fit()
    expected = history.states[0]
    for step, decay in decays.items():
        pairs = {name: (value, history.states[step][name]) for name, value in expected.items()}
        expected = {  # a count is no average: it is the model's
            name: decay * kept + (1 - decay) * now if now.is_floating_point() else now
            for name, (kept, now) in pairs.items()
        }
    torch.testing.assert_close(ema.state_dict()["model"], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 8}, {"epochs": 3}, {"batch_size": 0, "epochs": 3}, {"start_epoch": -1}],
)
def test_an_ema_of_half_a_run_is_refused(options):
    with pytest.raises(CallbackError, match=r"choose at least|the decay is scaled by both"):
        EMA(**options)


@pytest.mark.parametrize("used", [True, False])
def test_which_weights_are_evaluated_is_explicit(make_trainer, tmp_path, used):
    ema = EMA(decay=0.9, use_for_evaluation=used)
    trainer = make_trainer({"ema": ema, "checkpoint": Checkpoint()}, tmp_path)
    trainer.fit()
    trained = copy.deepcopy(trainer.model.state_dict())
    evaluated = trainer.evaluate(trainer.val_loaders["val"], "val")
    assert all(torch.equal(v, trained[n]) for n, v in trainer.model.state_dict().items())
    state = ema.state_dict()["model"] if used else trained
    plain = make_trainer({})
    plain.model.load_state_dict(state)
    assert plain.evaluate(plain.val_loaders["val"], "val") == evaluated
    assert trainer.metrics["val/loss"] == evaluated["val/loss"]
    # As the evaluate command: the checkpoint has both, and nothing is fitted.
    payload = read_checkpoint(tmp_path / "checkpoints" / "last.pt")
    assert torch.equal(payload["model"]["0.weight"], trained["0.weight"])
    fresh = make_trainer({"ema": EMA(0.9, use_for_evaluation=used)})
    snapshot.load_weights(fresh.components, payload)
    assert fresh.evaluate(fresh.val_loaders["val"], "val") == evaluated


def values_of(model):
    return copy.deepcopy(model.state_dict())


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("used", [True, False])
def test_average_weights_are_there_at_every_hook_and_gone_afterwards(make_trainer, used):
    """Nested, in an evaluation, and however it ends: training is that without them."""
    ema = EMA(decay=0.8, warmup=False, use_for_evaluation=used)

    class Samples(Callback):
        def on_update_end(self, trainer):
            own = values_of(trainer.model)
            with suppress(RuntimeError), trainer.average_weights():
                assert same(values_of(trainer.model), ema.tensors())
                with trainer.average_weights("ema"), trainer.evaluating():
                    assert same(values_of(trainer.model), ema.tensors())
                    assert not trainer.model.training
                trainer.model.train()(torch.randn(5, 3, dtype=torch.float64))  # statistics
                assert same({"0.weight": trainer.model[0].weight}, ema.tensors())
                raise RuntimeError("in between")
            assert same(own, values_of(trainer.model))

        on_fit_start = on_gradients = on_boundary = on_epoch_end = on_fit_end = on_update_end

        def on_validation_start(self, trainer):
            self.on_update_end(trainer)

        def on_validation_batch(self, trainer, batch, output):
            self.seen = same(values_of(trainer.model), ema.tensors())

    samples, states = Samples(), []
    for callbacks in ({"ema": ema, "samples": samples}, {"ema": EMA(0.8, warmup=False)}):
        trainer = make_trainer(callbacks)
        generator = torch.random.get_rng_state()
        trainer.fit()
        torch.random.set_rng_state(generator)
        states.append(values_of(trainer.model))
    assert same(*states)
    assert samples.seen is used  # in a validation the model has what is evaluated


def test_average_weights_say_which_average_is_meant(make_trainer):
    with pytest.raises(ModelError, match=r"average_weights\(\): no callback keeps an average"):
        make_trainer({}).average_weights()
    slow = EMA(0.99, use_for_evaluation=False)
    both = make_trainer({"fast": EMA(0.5), "slow": slow})
    both.fit()
    own = values_of(both.model)
    with both.average_weights():
        assert same(values_of(both.model), both.average.tensors())
    with both.average_weights("slow"):
        assert same(values_of(both.model), slow.tensors())
    assert same(own, values_of(both.model))
    with pytest.raises(ModelError, match=r"average_weights\('mean'\): the averages are fast, slow"):
        both.average_weights("mean")
    unclear = make_trainer({n: EMA(use_for_evaluation=False) for n in ("one", "two")})
    with pytest.raises(ModelError, match=r"average_weights\(\): the averages are one, two"):
        unclear.average_weights()


def test_before_its_first_epoch_swa_leaves_the_model_its_own_weights(make_trainer):
    trainer = make_trainer({"swa": SWA(start_epoch=100)})
    trainer.fit()
    own = values_of(trainer.model)
    with trainer.average_weights():
        assert same(own, values_of(trainer.model))


def test_buffers_that_are_copied_are_the_models_between_two_averagings(make_trainer):
    seen = []

    class Looks(Callback):
        def on_validation_start(self, trainer):
            with trainer.evaluation_weights():
                seen.append(trainer.model[1].running_mean.clone())

    ema = EMA(0.9, update_every=3, use_buffers=False)
    trainer = make_trainer({"looks": Looks(), "ema": ema}, max_epochs=1)
    trainer.fit()  # 5 updates: the last average is that of the third
    own, saved = trainer.model.state_dict(), ema.state_dict()["model"]
    assert torch.equal(seen[-1], own["1.running_mean"])
    differ = {name for name in own if not torch.equal(saved[name], own[name])}
    assert differ == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


class Torchs(Callback):
    """torch's own AveragedModel, fed at the ends of epochs."""

    def __init__(self, start_epoch):
        self._start_epoch = start_epoch

    def on_fit_start(self, trainer):
        self.model = AveragedModel(trainer.model)

    def on_epoch_end(self, trainer):
        if trainer.state.epoch > self._start_epoch:
            self.model.update_parameters(trainer.model)


@pytest.mark.parametrize(("start_epoch", "first", "count"), [(1, 1, 3), (0.5, 2, 2), (0, 0, 4)])
def test_swa_equals_torchs_own(make_trainer, start_epoch, first, count):
    swa, theirs = SWA(start_epoch), Torchs(first)
    trainer = make_trainer({"swa": swa, "theirs": theirs}, max_epochs=4)
    trainer.fit()
    assert swa.averaged == count
    # torch's pass over the training data, by which it, too, measures the average's statistics.
    update_bn(list(trainer.train_loader._loader), theirs.model)
    ours = swa.state_dict()["model"]
    for name, value in theirs.model.module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


def test_training_does_not_depend_on_an_average(make_trainer):
    states = []
    for callbacks in ({"swa": SWA(1), "ema": EMA(0.9, use_for_evaluation=False)}, {}):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)]
        trainer = make_trainer(callbacks, model=nn.Sequential(*layers).double(), max_epochs=4)
        torch.manual_seed(1)
        trainer.fit()
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_before_it_begins_the_model_itself_is_evaluated(make_trainer):
    same = []

    class Compare(Callback):
        def on_validation_end(self, trainer, metrics):
            with_swap = trainer.evaluate(trainer.val_loaders["val"], "val")
            plain = replace(trainer.components, average=None)
            step = trainer.state.global_step
            same.append(with_swap == evaluate(plain, trainer.val_loaders["val"], "val", step=step))

    make_trainer({"swa": SWA(1), "compare": Compare()}, max_epochs=3).fit()
    assert same == [True, False, False]


def test_a_share_of_a_run_needs_its_length_and_one_too_short_says_so(make_trainer, caplog):
    trainer = make_trainer({"swa": SWA(0.75)}, max_epochs=None, max_steps=4)
    with pytest.raises(CallbackError, match=r"callbacks\.swa\.start_epoch=0\.75 is a share"):
        trainer.fit()
    make_trainer({"swa": SWA(5)}).fit()
    assert "callbacks.swa: the run ended before its start_epoch" in caplog.text
