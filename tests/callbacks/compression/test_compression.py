"""Pruned weights: which, when, and that they stay zero; and weights on a grid of 8 bits."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.compression.pruning import Pruning, Settings, extend
from regimen.callbacks.compression.qat import QuantizationAwareTraining, rounded_weight
from regimen.callbacks.ema import EMA
from regimen.callbacks.swa import SWA
from regimen.conf.errors import ConfigError
from regimen.trainer.callback import Average, Callback
from regimen.trainer.checkpoints.archive import read_safetensors
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.distributed import Group
from regimen.trainer.state import TrainState
from toys import StopAt

WEIGHTS = {"weights": {"kind": "matrix"}}
FIRST = [[1.0, -8.0, 3.0], [-2.0, 5.0, 0.5]]
SECOND = [[-4.0, 6.0], [7.0, -0.25]]


def net():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(FIRST))
        model[1].weight.copy_(torch.tensor(SECOND))
    return model


def pruned_of(rules, *levels, seed=0, **options):
    """Prune to each level in turn; return the final masks."""
    pruning = Pruning(rules=rules, **options)
    pruning.check(net())
    pruned = {
        name: torch.zeros_like(p, dtype=torch.bool)
        for pool in pruning.pools
        for name, p in pool.members.items()
    }
    for level in levels:
        for pool in pruning.pools:
            extend(pool, pruned, level, seed)
    return {name: mask.int().tolist() for name, mask in pruned.items()}


SLICES, ROWS = {"method": "ln_structured"}, ([[0, 0, 0], [1, 1, 1]], [[0, 0], [1, 1]])
COLUMNS = ([[1, 0, 1], [1, 0, 1]], [[0, 1], [0, 1]])
LARGE = [[1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("options", "level", "masks"),
    [
        pytest.param({}, 0.4, (LARGE, [[0, 0], [0, 1]]), id="l1-global"),
        pytest.param({"scope": "layer"}, 0.5, (LARGE, [[1, 0], [0, 1]]), id="layer"),
        # Norms: 8.60 and 5.41; 7.21 and 7.00.
        pytest.param({**SLICES, "scope": "layer"}, 0.5, ROWS, id="rows"),
        # Root mean squares of rows: 4.97 and 3.12; 5.10 and 4.95.
        pytest.param(SLICES, 0.75, ([[1, 1, 1], [1, 1, 1]], ROWS[1]), id="sizes"),
        # Of columns: sums 3, 13, 3.5 and 11, 6.25, over two weights each.
        pytest.param({**SLICES, "norm": 1.0, "dim": 1}, 0.6, COLUMNS, id="columns-global"),
    ],
)
def test_masks_by_hand(options, level, masks):
    found = pruned_of(WEIGHTS, level, **options)
    assert found == dict(zip(("0.weight", "1.weight"), masks, strict=True))


def test_random_masks_follow_from_the_seed_and_grow():
    few, many = (pruned_of(WEIGHTS, level, method="random") for level in (0.3, 0.7))
    assert pruned_of(WEIGHTS, 0.3, 0.7, method="random") == many
    assert pruned_of(WEIGHTS, 0.7, method="random", seed=1) != many
    flat = [torch.cat([torch.tensor(m).flatten() for m in masks.values()]) for masks in (few, many)]
    assert [int(f.sum()) for f in flat] == [3, 7]
    assert (flat[0] <= flat[1]).all()


def test_equal_weights_go_in_order_and_what_is_pruned_stays():
    model, pruning = nn.Sequential(nn.Linear(4, 1)), Pruning(rules=WEIGHTS)
    nn.init.ones_(model[0].weight)
    pruning.check(model)
    pruned = {"0.weight": torch.tensor([[False, False, False, True]])}
    extend(pruning.pools[0], pruned, 0.5, seed=0)
    assert pruned["0.weight"].tolist() == [[True, False, False, True]]


def test_rules_divide_as_parameter_groups_do():
    rules = {"out": {"match": "^1"}, "first": {"kind": "matrix", "sparsity": 0.7, "scope": "layer"}}
    out = {**rules, "out": {"match": "^1", "sparsity": 0}}
    assert list(pruned_of(rules, 0.5)) == ["1.weight", "1.bias", "0.weight"]
    assert pruned_of(out, 0.5) == {"0.weight": [[1, 0, 0], [1, 0, 1]]}


def only(**rule):
    return {"rules": {"a": {"match": "0", **rule}}}


SHADOWED = {"rules": {"a": {"match": "0"}, "b": {"match": r"0\.weight"}}}


MISTAKES = {
    "rules.b: has no parameter left": SHADOWED,
    r"rules\.a\.sparsty: unknown key; did you mean sparsity": only(sparsty=1),
    r"a\.frozen: unknown key": only(frozen=True),
    "rules: there is none": {"rules": {}},
    "rules.a: .* has no slices along 0": {**only(), "method": "ln_structured"},
    "sparsity=1.0: choose 0 or more, less than 1": {"sparsity": 1.0},
    r"rules\.a: sparsity=2": only(sparsity=2),
    "initial_sparsity=0.6: .* stays pruned": {"initial_sparsity": 0.6},
    "l1, random, ln_structured": {"method": "l2"},
    "global, layer": {"scope": "all"},
    "start_step=-1: choose a whole number": {"start_step": -1},
    "end_step=4: choose at least start_step=5": {"start_step": 5, "end_step": 4},
    r"end_step=0\.25: choose at least start_step=0\.5": {"start_step": 0.5, "end_step": 0.25},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_config_errors(said):
    with pytest.raises(ConfigError, match=said):
        Pruning(**{"rules": WEIGHTS, **MISTAKES[said]}).check(net())


def test_the_schedule_of_zhu_and_gupta():
    plan = Pruning(rules=WEIGHTS, start_step=4, end_step=0.75, every_n_steps=3).schedule(20)
    settings = Settings(0.8, 0.2)
    assert list(plan) == [4, 7, 10, 13]
    for step in range(4, 20):
        last = min(step - (step - 4) % 3, 13)
        expected = 0.8 + (0.2 - 0.8) * (1 - (last - 4) / (3 * 3)) ** 3
        assert settings.level(plan, step) == pytest.approx(expected, abs=1e-15)
    at_once = Pruning(rules=WEIGHTS, start_step=3).schedule(None)
    assert (list(at_once), settings.level(at_once, 3)) == ([3], 0.8)
    with pytest.raises(ConfigError, match="give a number"):
        Pruning(rules=WEIGHTS, start_step=0.5).schedule(None)


class Zeros(Callback):
    """Remember how many weights are zero after each update, and in each validation."""

    def __init__(self):
        self.counts = []
        self.validated = []

    def on_update_end(self, trainer):
        self.counts.append(zeros_of(trainer))

    def on_validation_start(self, trainer):
        with trainer.evaluation_weights():
            self.validated.append(zeros_of(trainer))


def zeros_of(trainer):
    return sum(int((trainer.model[i].weight == 0).sum()) for i in (0, 3))


def gradual(**options):
    steps = {"start_step": 2, "end_step": 8, "every_n_steps": 3}
    return Pruning(
        rules=WEIGHTS, **{"sparsity": 0.75, "initial_sparsity": 0.25, **steps, **options}
    )


def test_trains_as_written_out_by_hand(make_trainer):
    callbacks = {"pruning": gradual(), "zeros": Zeros()}
    trainer = make_trainer(callbacks, clip_grad_norm=0.5)
    model = copy.deepcopy(trainer.model)
    batches = [b for _ in range(2) for b in trainer.train_loader._loader]
    trainer.fit()
    masks = {model[i].weight: torch.ones_like(model[i].weight) for i in (0, 3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    levels = {2: 12, 5: round(48 * (0.75 - 0.5 * 0.5**3)), 8: 36}
    for step, (inputs, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        for weight, mask in masks.items():
            weight.grad *= mask
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for weight, mask in masks.items():
                weight *= mask
            if step in levels:
                flat = torch.cat([weight.abs().flatten() for weight in masks])
                bound = flat.sort().values[levels[step] - 1]
                for weight, mask in masks.items():
                    mask.copy_(weight.abs() > bound)
                    weight *= mask
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=0, atol=1e-13)
    assert trainer.callbacks["zeros"].counts == [0, 12, 12, 12, 33, 33, 33, 36, 36, 36]
    assert trainer.metrics["pruning/sparsity"] == 36 / 48


def test_a_run_that_goes_on_with_pruning_is_pruned_at_once(make_trainer, carry_over):
    dense = make_trainer({"ema": EMA(0.9), "stop": StopAt(6)})
    going_on = make_trainer({"pruning": gradual(), "ema": EMA(0.9), "zeros": Zeros()})
    dense.fit()
    carry_over(dense, going_on)
    going_on.fit()
    assert going_on.callbacks["zeros"].counts == [33, 36, 36, 36]


@pytest.mark.parametrize(
    "average",
    [lambda: EMA(0.99, update_every=3), lambda: SWA(0), lambda: EMA(use_for_evaluation=False)],
    ids=["ema", "swa", "not evaluated"],
)
def test_averages_are_pruned_wherever_they_go(make_trainer, tmp_path, average):
    callbacks = {"pruning": gradual(), "average": average(), "zeros": Zeros()}
    trainer = make_trainer({**callbacks, "save": Checkpoint(save_weights=True)}, tmp_path)
    trainer.fit()
    assert callbacks["zeros"].validated == [33, 36]
    folder = tmp_path / "checkpoints"
    payload = read_checkpoint(folder / "last.pt")
    kept = payload["ema"] or payload["callbacks"]["average"]
    assert int(sum((kept["model"][f"{i}.weight"] == 0).sum() for i in (0, 3))) == 36
    best = read_safetensors(folder / "best.safetensors")
    assert sum(int((best[f"{i}.weight"] == 0).sum()) for i in (0, 3)) in (33, 36)


def test_averages_that_would_keep_pruned_weights_are_refused(make_trainer):
    for callbacks, said in (
        ({"pruning": gradual(), "own": Average()}, r"callbacks\.own would keep"),
        ({"ema": EMA(0.9), "pruning": gradual()}, r"must come before callbacks\.ema"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_trainer(callbacks).fit()


def test_a_skipped_update_prunes_nothing(make_trainer):
    callbacks = {"pruning": gradual(), "zeros": Zeros()}
    make_trainer(callbacks, spoilt=1, max_epochs=1, on_nonfinite="skip").fit()
    assert callbacks["zeros"].counts == [0, 0, 12, 12, 12]


def test_a_sparsity_of_0_prunes_nothing(make_trainer):
    callbacks = {"pruning": Pruning(rules=WEIGHTS, sparsity=0), "zeros": Zeros()}
    trainer = make_trainer(callbacks, max_epochs=1)
    trainer.fit()
    assert callbacks["zeros"].counts == [0] * 5
    assert trainer.metrics["pruning/sparsity"] == 0


def test_the_plan_tells_the_layers(make_trainer):
    trainer = make_trainer({"pruning": gradual(scope="layer")})
    plan = "\n".join(trainer.callbacks["pruning"].explain(trainer))
    assert "from step 2 to 8, every 3" in plan
    assert "0.weight: 32 weights, 75.0% (rules.weights, l1, layer)" in plan


def test_weights_are_rounded_by_channel_and_gradients_pass():
    weight = torch.tensor([[0.5, -1.27, 0.0126], [12.7, 0.0, 0.26]], requires_grad=True)
    rounded = rounded_weight(weight)
    torch.testing.assert_close(
        rounded.detach(), torch.tensor([[0.5, -1.27, 0.01], [12.7, 0.0, 0.3]])
    )
    rounded.square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * rounded.detach())
    assert torch.equal(rounded_weight(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_inputs_are_rounded_to_a_running_range_of_whole_updates():
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    plain = copy.deepcopy(layer)
    qat, model = QuantizationAwareTraining(), nn.Sequential(layer)
    qat.check(model)
    qat.attach(model)
    trainer = SimpleNamespace(group=Group(), state=TrainState())
    qat._start = 1
    low = high = torch.zeros(())
    for number in range(3):
        x = torch.randn(10, 3) * (number + 1)
        qat.rounds = False
        layer(x[:6]), layer(x[6:])
        with torch.no_grad():
            layer(100 * x)  # an evaluation is not seen
        share = 0.1 if number else 1.0
        low, high = low + share * (x.min() - low), high + share * (x.max() - high)
        qat.on_update_end(trainer)
    ranges = qat.state_dict()["fake_quantization"]
    torch.testing.assert_close((ranges["low"][0], ranges["high"][0]), (low, high))
    qat.rounds = True
    scale = (high - low) / 255
    zero = (-low / scale).round()
    rounded = (((x / scale).round() + zero).clamp(0, 255) - zero) * scale
    expected = nn.functional.linear(rounded, rounded_weight(plain.weight), plain.bias)
    torch.testing.assert_close(layer(x), expected)
    qat.teardown(None)
    assert type(layer) is nn.Linear
    assert torch.equal(layer(x), plain(x))
