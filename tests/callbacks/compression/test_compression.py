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
    first = nn.Linear(3, 2).double()
    second = nn.Linear(2, 2).double()
    with torch.no_grad():
        first.weight.copy_(torch.tensor(FIRST))
        second.weight.copy_(torch.tensor(SECOND))
    return nn.Sequential(first, second)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def pruned_of(rules, *levels, seed=0, **options):
    """Prune to each level in turn; return the final masks."""
    pruning = Pruning(rules=rules, **options)
    pruning.check(net())
    pruned = {}
    for pool in pruning.pools:
        for name, parameter in pool.members.items():
            pruned[name] = torch.zeros_like(parameter, dtype=torch.bool)

    for level in levels:
        for pool in pruning.pools:
            extend(pool, pruned, level, seed)
    return {name: mask.int().tolist() for name, mask in pruned.items()}


SLICES = {"method": "ln_structured"}
ROWS = ([[0, 0, 0], [1, 1, 1]], [[0, 0], [1, 1]])
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
    first, second = masks
    assert pruned_of(WEIGHTS, level, **options) == {"0.weight": first, "1.weight": second}


def test_random_masks_follow_from_the_seed_and_grow():
    few = pruned_of(WEIGHTS, 0.3, method="random")
    many = pruned_of(WEIGHTS, 0.7, method="random")
    in_two_steps = pruned_of(WEIGHTS, 0.3, 0.7, method="random")
    of_another_seed = pruned_of(WEIGHTS, 0.7, method="random", seed=1)

    assert in_two_steps == many
    assert of_another_seed != many

    few_flat = flat(torch.tensor(mask) for mask in few.values())
    many_flat = flat(torch.tensor(mask) for mask in many.values())
    assert few_flat.sum() == 3
    assert many_flat.sum() == 7
    assert (few_flat <= many_flat).all()


def test_equal_weights_go_in_order_and_what_is_pruned_stays():
    layer = nn.Linear(4, 1)
    nn.init.ones_(layer.weight)
    pruning = Pruning(rules=WEIGHTS)
    pruning.check(nn.Sequential(layer))
    (pool,) = pruning.pools
    mask = torch.tensor([[False, False, False, True]])

    extend(pool, {"0.weight": mask}, 0.5, seed=0)

    assert mask.tolist() == [[True, False, False, True]]


def test_rules_divide_as_parameter_groups_do():
    first = {"kind": "matrix", "sparsity": 0.7, "scope": "layer"}
    both = {"out": {"match": "^1"}, "first": first}
    without_out = {"out": {"match": "^1", "sparsity": 0}, "first": first}

    assert list(pruned_of(both, 0.5)) == ["1.weight", "1.bias", "0.weight"]
    assert pruned_of(without_out, 0.5) == {"0.weight": [[1, 0, 0], [1, 0, 1]]}


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
    options = {"rules": WEIGHTS, **MISTAKES[said]}
    with pytest.raises(ConfigError, match=said):
        Pruning(**options).check(net())


def test_the_schedule_of_zhu_and_gupta():
    plan = Pruning(rules=WEIGHTS, start_step=4, end_step=0.75, every_n_steps=3).schedule(20)
    settings = Settings(0.8, 0.2)
    assert list(plan) == [4, 7, 10, 13]
    for step in range(4, 20):
        last = min(step - (step - 4) % 3, 13)
        progress = (last - 4) / (3 * 3)
        expected = 0.8 + (0.2 - 0.8) * (1 - progress) ** 3
        assert settings.level(plan, step) == pytest.approx(expected, abs=1e-15)


def test_a_schedule_without_an_end_prunes_once():
    plan = Pruning(rules=WEIGHTS, start_step=3).schedule(None)
    settings = Settings(0.8, 0.2)
    assert list(plan) == [3]
    assert settings.level(plan, 3) == 0.8

    share_of_an_unknown_length = Pruning(rules=WEIGHTS, start_step=0.5)
    with pytest.raises(ConfigError, match="give a number"):
        share_of_an_unknown_length.schedule(None)


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


def zeros_in(weights):
    """Count the zeros of the two matrices."""
    return sum(int((weights[name] == 0).sum()) for name in ("0.weight", "3.weight"))


def zeros_of(trainer):
    return zeros_in(trainer.model.state_dict())


def gradual(**options):
    """Prune at steps 2, 5 and 8, from a quarter of the 48 weights to three quarters."""
    schedule = {
        "sparsity": 0.75,
        "initial_sparsity": 0.25,
        "start_step": 2,
        "end_step": 8,
        "every_n_steps": 3,
    }
    return Pruning(rules=WEIGHTS, **schedule | options)


def zero_masked(masks):
    with torch.no_grad():
        for weight, mask in masks.items():
            weight *= mask


def mask_smallest(masks, count):
    """Mask the `count` weights of least magnitude, over all layers."""
    magnitudes = flat(weight.detach().abs() for weight in masks)
    bound = magnitudes.sort().values[count - 1]
    for weight, mask in masks.items():
        mask.copy_(weight.abs() > bound)


def trained_by_hand(model, batches, pruned_at):
    """Train with SGD and clipping, and prune as many weights as the steps say."""
    weights = [model[0].weight, model[3].weight]
    masks = {weight: torch.ones_like(weight) for weight in weights}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (inputs, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        errors = model(inputs) - targets
        loss = errors.square().mean()
        loss.backward()
        for weight, mask in masks.items():
            weight.grad *= mask
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        zero_masked(masks)
        if step in pruned_at:
            mask_smallest(masks, pruned_at[step])
            zero_masked(masks)


def test_trains_as_written_out_by_hand(make_trainer):
    zeros = Zeros()
    trainer = make_trainer({"pruning": gradual(), "zeros": zeros}, clip_grad_norm=0.5)
    model = copy.deepcopy(trainer.model)
    batches = list(trainer.train_loader._loader)
    trainer.fit()
    at_step_5 = 0.75 - 0.5 * 0.5**3  # halfway in time, a half cubed of the way is left
    trained_by_hand(model, batches * 2, {2: 12, 5: round(48 * at_step_5), 8: 36})

    found = trainer.model.state_dict()

    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13)
    assert zeros.counts == [0, 12, 12, 12, 33, 33, 33, 36, 36, 36]
    assert trainer.metrics["pruning/sparsity"] == 36 / 48


def test_a_run_that_goes_on_with_pruning_is_pruned_at_once(make_trainer, carry_over):
    zeros = Zeros()
    dense = make_trainer({"ema": EMA(0.9), "stop": StopAt(6)})
    going_on = make_trainer(
        {
            "pruning": gradual(),
            "ema": EMA(0.9),
            "zeros": zeros,
        }
    )
    dense.fit()
    carry_over(dense, going_on)
    going_on.fit()

    assert zeros.counts == [33, 36, 36, 36]


@pytest.mark.parametrize(
    "average",
    [lambda: EMA(0.99, update_every=3), lambda: SWA(0), lambda: EMA(use_for_evaluation=False)],
    ids=["ema", "swa", "not evaluated"],
)
def test_averages_are_pruned_wherever_they_go(make_trainer, tmp_path, average):
    zeros = Zeros()
    callbacks = {
        "pruning": gradual(),
        "average": average(),
        "zeros": zeros,
        "save": Checkpoint(save_weights=True),
    }
    make_trainer(callbacks, tmp_path).fit()

    folder = tmp_path / "checkpoints"
    payload = read_checkpoint(folder / "last.pt")
    kept = payload["ema"] or payload["callbacks"]["average"]
    best = read_safetensors(folder / "best.safetensors")

    assert zeros.validated == [33, 36]
    assert zeros_in(kept["model"]) == 36
    assert zeros_in(best) in (33, 36)


def test_averages_that_would_keep_pruned_weights_are_refused(make_trainer):
    of_ones_own = {"pruning": gradual(), "own": Average()}
    with pytest.raises(ConfigError, match=r"callbacks\.own would keep"):
        make_trainer(of_ones_own).fit()

    in_the_wrong_order = {"ema": EMA(0.9), "pruning": gradual()}
    with pytest.raises(ConfigError, match=r"must come before callbacks\.ema"):
        make_trainer(in_the_wrong_order).fit()


def test_a_skipped_update_prunes_nothing(make_trainer):
    zeros = Zeros()
    callbacks = {"pruning": gradual(), "zeros": zeros}
    make_trainer(callbacks, spoilt=1, max_epochs=1, on_nonfinite="skip").fit()
    assert zeros.counts == [0, 0, 12, 12, 12]


def test_a_sparsity_of_0_prunes_nothing(make_trainer):
    callbacks = {"pruning": Pruning(rules=WEIGHTS, sparsity=0), "zeros": Zeros()}
    trainer = make_trainer(callbacks, max_epochs=1)
    trainer.fit()
    assert callbacks["zeros"].counts == [0] * 5
    assert trainer.metrics["pruning/sparsity"] == 0


def test_the_plan_tells_the_layers(make_trainer):
    pruning = gradual(scope="layer")
    trainer = make_trainer({"pruning": pruning})
    plan = "\n".join(pruning.explain(trainer))

    assert "from step 2 to 8, every 3" in plan
    assert "0.weight: 32 weights, 75.0% (rules.weights, l1, layer)" in plan


def test_weights_are_rounded_by_channel_and_gradients_pass():
    values = [[0.5, -1.27, 0.0126], [12.7, 0.0, 0.26]]
    weight = torch.tensor(values, requires_grad=True)
    rounded = rounded_weight(weight)
    loss = rounded.square().sum()
    loss.backward()

    expected = torch.tensor([[0.5, -1.27, 0.01], [12.7, 0.0, 0.3]])

    torch.testing.assert_close(rounded.detach(), expected)
    torch.testing.assert_close(weight.grad, 2 * expected)


def test_weights_of_zero_stay_zero_when_rounded():
    zeros = torch.zeros(2, 3)
    assert torch.equal(rounded_weight(zeros), zeros)


def rounded_to_8_bits(x, low, high):
    """Round to the 256 values between `low` and `high`, of which one is 0."""
    scale = (high - low) / 255
    zero = (-low / scale).round()
    whole = ((x / scale).round() + zero).clamp(0, 255)
    return (whole - zero) * scale


@pytest.fixture
def rounding():
    """Return a layer whose inputs are rounded, and the callback that does it."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    model = nn.Sequential(layer)
    qat = QuantizationAwareTraining()
    qat.check(model)
    qat.attach(model)
    qat._start = 1
    return layer, qat


def observe(qat, layer, x):
    """Compute an update of two micro-batches, and evaluate between them and its end."""
    qat.rounds = False
    for micro_batch in (x[:6], x[6:]):
        layer(micro_batch)
    with torch.no_grad():
        layer(100 * x)  # an evaluation is not seen
    qat.on_update_end(SimpleNamespace(group=Group(), state=TrainState()))


def test_inputs_are_rounded_to_a_running_range_of_whole_updates(rounding):
    layer, qat = rounding
    low = torch.zeros(())
    high = torch.zeros(())
    for number in range(3):
        x = torch.randn(10, 3) * (number + 1)
        observe(qat, layer, x)
        share = 1.0 if number == 0 else 0.1
        low = low + share * (x.min() - low)
        high = high + share * (x.max() - high)
    ranges = qat.state_dict()["fake_quantization"]

    torch.testing.assert_close(ranges["low"][0], low)
    torch.testing.assert_close(ranges["high"][0], high)

    qat.rounds = True
    inputs = rounded_to_8_bits(x, low, high)
    weight = rounded_weight(layer.weight)
    expected = nn.functional.linear(inputs, weight, layer.bias)

    torch.testing.assert_close(layer(x), expected)


def test_a_layer_is_plain_again_behind_the_training(rounding):
    layer, qat = rounding
    plain = nn.Linear(3, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(10, 3)
    observe(qat, layer, x)
    qat.teardown(None)

    assert type(layer) is nn.Linear
    assert torch.equal(layer(x), plain(x))
