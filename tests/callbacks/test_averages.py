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
    change_statistics(model, features=3)


def change_statistics(model, features):
    model.train()
    model(torch.randn(5, features, dtype=torch.float64))


def values_of(model):
    return copy.deepcopy(model.state_dict())


def places_of(model):
    """Return which tensors the parameters are, and where they lie in memory."""
    return {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_exchange_gives_values_and_keeps_tensors():
    model = make_model()
    average = RunningAverage()
    average.begin(model)
    start = values_of(model)
    disturb(model)
    trained = values_of(model)
    places = places_of(model)

    with suppress(RuntimeError), average.exchanged(model):
        assert same(values_of(model), start)
        raise RuntimeError("in between")

    assert same(values_of(model), trained)
    assert places_of(model) == places


def test_an_average_is_loaded_before_it_begins_or_under_way():
    model = make_model()
    average = RunningAverage()
    average.begin(model)
    start = values_of(model)
    disturb(model)
    under_way = RunningAverage()
    under_way.begin(model)

    for target in (RunningAverage(), under_way):
        target.load_state_dict(average.state_dict())
        with target.exchanged(model):
            assert same(values_of(model), start)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


HALVE = get_ema_multi_avg_fn(0.5)  # half of the way to the model


def halved_of(model):
    """Return an average that went half of the way to zero, and where it began."""
    average = RunningAverage()
    average.begin(model)
    start = average.tensors()["first.weight"].clone()
    with torch.no_grad():
        model.first.weight.zero_()
    average.update(HALVE)
    return average, start


def test_tied_weights_move_once_and_keep_both_names():
    average, start = halved_of(Tied())
    state = average.tensors()
    assert state.keys() == {"first.weight", "second.weight"}
    assert torch.equal(state["first.weight"], start / 2)


def test_an_average_of_tied_weights_goes_on_from_its_state():
    model = Tied()
    average, start = halved_of(model)
    saved = {name: value.clone() for name, value in average.tensors().items()}
    loaded = RunningAverage()
    loaded.load_state_dict({"model": saved})
    loaded.begin(model)
    loaded.update(HALVE)

    assert torch.equal(loaded.tensors()["second.weight"], start / 4)


class History(Callback):
    """Remember the model after every update."""

    def __init__(self):
        self.states = []

    def on_fit_start(self, trainer):
        self.states.append(values_of(trainer.model))

    on_update_end = on_fit_start


PLAIN = {"decay": 0.8, "warmup": False}
WARMUP = {step: min(0.4, (1 + step) / (10 + step)) for step in (2, 4, 6, 8, 10)}


def average_by_hand(states, decays):
    """Return the average of a history of models; `decays`: by the step where it moves."""
    average = states[0]
    for step, decay in decays.items():
        moved = {}
        for name, now in states[step].items():
            if now.is_floating_point():
                moved[name] = decay * average[name] + (1 - decay) * now
            else:
                moved[name] = now  # a count is no average: it is the model's
        average = moved
    return average


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
    history = History()
    ema = EMA(**options)
    callbacks = {"history": history, "ema": ema}
    make_trainer(callbacks, spoilt=spoilt, on_nonfinite="skip").fit()

    expected = average_by_hand(history.states, decays)
    found = ema.state_dict()["model"]

    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 8}, {"epochs": 3}, {"batch_size": 0, "epochs": 3}, {"start_epoch": -1}],
)
def test_an_ema_of_half_a_run_is_refused(options):
    with pytest.raises(CallbackError, match=r"of at least|the decay is scaled by both"):
        EMA(**options)


def validated(trainer):
    return trainer.evaluate(trainer.val_loaders["val"], "val")


@pytest.mark.parametrize("used", [True, False])
def test_which_weights_are_evaluated_is_explicit(make_trainer, tmp_path, used):
    ema = EMA(decay=0.9, use_for_evaluation=used)
    trainer = make_trainer({"ema": ema, "checkpoint": Checkpoint()}, tmp_path)
    trainer.fit()
    trained = values_of(trainer.model)
    evaluated = validated(trainer)

    assert same(values_of(trainer.model), trained)
    assert trainer.metrics["val/loss"] == evaluated["val/loss"]

    chosen = ema.state_dict()["model"] if used else trained
    plain = make_trainer({})
    plain.model.load_state_dict(chosen)

    assert validated(plain) == evaluated

    # As the evaluate command: the checkpoint has both, and nothing is fitted.
    payload = read_checkpoint(tmp_path / "checkpoints" / "last.pt")
    assert torch.equal(payload["model"]["0.weight"], trained["0.weight"])

    fresh = make_trainer({"ema": EMA(0.9, use_for_evaluation=used)})
    snapshot.load_weights(fresh.components, payload)
    assert validated(fresh) == evaluated


def fitted(trainer):
    """Train, with the generators of torch as they were behind it; return the weights."""
    generator = torch.random.get_rng_state()
    trainer.fit()
    torch.random.set_rng_state(generator)
    return values_of(trainer.model)


@pytest.mark.parametrize("used", [True, False])
def test_average_weights_are_there_at_every_hook_and_gone_afterwards(make_trainer, used):
    """Nested, in an evaluation, and however it ends: training is that without them."""
    ema = EMA(decay=0.8, warmup=False, use_for_evaluation=used)

    class Samples(Callback):
        def on_update_end(self, trainer):
            model = trainer.model
            own = values_of(model)
            with suppress(RuntimeError), trainer.average_weights():
                assert same(values_of(model), ema.tensors())
                with trainer.average_weights("ema"), trainer.evaluating():
                    assert same(values_of(model), ema.tensors())
                    assert not model.training
                change_statistics(model, features=4)
                assert torch.equal(model[0].weight, ema.tensors()["0.weight"])
                raise RuntimeError("in between")
            assert same(own, values_of(model))

        on_fit_start = on_gradients = on_boundary = on_epoch_end = on_fit_end = on_update_end

        def on_validation_start(self, trainer):
            self.on_update_end(trainer)

        def on_validation_batch(self, trainer, batch, output):
            self.seen = same(values_of(trainer.model), ema.tensors())

    samples = Samples()
    sampled = fitted(make_trainer({"ema": ema, "samples": samples}))
    plain = fitted(make_trainer({"ema": EMA(0.8, warmup=False)}))

    assert same(sampled, plain)
    assert samples.seen is used  # in a validation the model has what is evaluated


def test_average_weights_say_which_average_is_meant(make_trainer):
    fast = EMA(0.5)
    slow = EMA(0.99, use_for_evaluation=False)
    trainer = make_trainer({"fast": fast, "slow": slow})
    trainer.fit()
    own = values_of(trainer.model)

    with trainer.average_weights():
        assert same(values_of(trainer.model), fast.tensors())
    with trainer.average_weights("slow"):
        assert same(values_of(trainer.model), slow.tensors())

    assert same(own, values_of(trainer.model))
    with pytest.raises(ModelError, match=r"average_weights\('mean'\): the averages are fast, slow"):
        trainer.average_weights("mean")


def test_average_weights_that_are_not_one_are_refused(make_trainer):
    none = make_trainer({})
    with pytest.raises(ModelError, match=r"average_weights\(\): no callback keeps an average"):
        none.average_weights()

    averages = {name: EMA(use_for_evaluation=False) for name in ("one", "two")}
    several = make_trainer(averages)
    with pytest.raises(ModelError, match=r"average_weights\(\): the averages are one, two"):
        several.average_weights()


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

    own = trainer.model.state_dict()
    saved = ema.state_dict()["model"]
    differ = {name for name in own if not torch.equal(saved[name], own[name])}

    assert differ == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert torch.equal(seen[-1], own["1.running_mean"])


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
    swa = SWA(start_epoch)
    theirs = Torchs(first)
    trainer = make_trainer({"swa": swa, "theirs": theirs}, max_epochs=4)
    trainer.fit()
    # torch's pass over the training data, by which it, too, measures the average's statistics.
    batches = list(trainer.train_loader._loader)
    update_bn(batches, theirs.model)

    assert swa.averaged == count

    ours = swa.state_dict()["model"]
    for name, value in theirs.model.module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


def with_dropout():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.Linear(8, 2),
    ).double()


def test_training_does_not_depend_on_an_average(make_trainer):
    def train(callbacks):
        trainer = make_trainer(callbacks, model=with_dropout(), max_epochs=4)
        torch.manual_seed(1)
        trainer.fit()
        return trainer.model.state_dict()

    averages = {"swa": SWA(1), "ema": EMA(0.9, use_for_evaluation=False)}
    assert same(train({}), train(averages))


def test_before_it_begins_the_model_itself_is_evaluated(make_trainer):
    are_same = []

    class Compare(Callback):
        def on_validation_end(self, trainer, metrics):
            val = trainer.val_loaders["val"]
            without_average = replace(trainer.components, average=None)
            plain = evaluate(without_average, val, "val", step=trainer.state.global_step)
            are_same.append(trainer.evaluate(val, "val") == plain)

    make_trainer({"swa": SWA(1), "compare": Compare()}, max_epochs=3).fit()
    assert are_same == [True, False, False]


def test_a_share_of_a_run_needs_its_length(make_trainer):
    trainer = make_trainer({"swa": SWA(0.75)}, max_epochs=None, max_steps=4)
    with pytest.raises(CallbackError, match=r"callbacks\.swa\.start_epoch=0\.75 is a share"):
        trainer.fit()


def test_a_run_that_is_too_short_for_its_average_says_so(make_trainer, caplog):
    make_trainer({"swa": SWA(5)}).fit()
    assert "callbacks.swa: the run ended before its start_epoch" in caplog.text
