"""Seeds, switches, random states: saved to the bit, untouched by what is beside the training."""

import os
import random

import numpy as np
import pytest
import torch
from torch import nn

import toys
from regimen.trainer import rng
from regimen.trainer.callback import Callback
from regimen.trainer.components.setup import set_switches
from regimen.trainer.evaluation import EvaluationAbandoned
from regimen.trainer.options import TrainerOptions
from regimen.trainer.rng import RandomStates, seed_everything
from regimen.trainer.tasks.regression import Regression
from toys import Samples, loader


def draw():
    """Draw from the generators of torch, Python and NumPy: uniform and normal numbers."""
    return (
        torch.rand(5).tolist(),
        [random.random() for _ in range(5)],
        np.random.rand(5).tolist(),
        random.gauss(0, 1),
        float(np.random.randn()),
    )


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with rng.seeded(torch.device("cpu")):
        yield
    set_switches(TrainerOptions())


def test_the_same_numbers_follow_and_every_part_matters():
    random.gauss(0, 1)  # leaves the second of a pair behind
    np.random.randn()
    states = RandomStates([], lambda: 0)
    saved = toys.through_a_file(states.state_dict())
    states.state_dict()  # draws nothing
    expected = draw()
    later = states.state_dict()

    assert draw() != expected

    remarks = states.load_state_dict(saved)
    assert remarks == []
    assert draw() == expected

    for part in ("torch", "python", "numpy"):
        states.load_state_dict({**saved, part: later[part]})
        assert draw() != expected


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_seed_repeats_and_the_next_and_other_ranks_differ(seed):
    def drawn(*seed_and_rank):
        seed_everything(*seed_and_rank)
        return draw()

    first = drawn(seed)
    assert drawn(seed, 0) == first

    torch.manual_seed(seed)
    of_torch, *_ = first
    assert torch.rand(5).tolist() == of_torch

    neighbour = seed ^ 1
    for other in (drawn(neighbour), drawn(seed, 1), drawn(seed, 2)):
        for numbers, same_place in zip(other, first, strict=True):
            assert numbers != same_place


@pytest.mark.parametrize("given", ["", ":16:8"])
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_switches_are_set_and_reported(deterministic, tf32, given):
    set_switches(TrainerOptions(deterministic=not deterministic, tf32=not tf32))
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if given:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = given
    precision = "tf32" if tf32 else "fp32"
    options = TrainerOptions(deterministic=deterministic, cudnn_benchmark=True, precision=precision)

    facts = set_switches(options)

    benchmark = not deterministic  # whose choice depends on timing

    assert facts == {"deterministic": deterministic, "cudnn_benchmark": benchmark, "tf32": tf32}
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.deterministic is deterministic
    assert torch.backends.cudnn.benchmark is benchmark
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32

    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if given:
        assert workspace == given
    elif deterministic:
        assert workspace == ":4096:8"
    else:
        assert workspace is None
    with torch.backends.cudnn.flags(enabled=False):  # which reads the older switches
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"


class Restless(nn.Module):
    """Draws from all generators in every pass, and tells what it drew in evaluation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.drawn = []
        self.before_evaluation = lambda: None

    def forward(self, x):
        noise = torch.rand(()).item() + random.random() + float(np.random.random())
        if not self.training:
            self.before_evaluation()
            self.drawn.append(noise)
        return self.linear(x) * (1 + 0.1 * noise)


def state(trainer):
    """Return weights and the states of all generators."""
    weights = [p.tolist() for p in trainer.model.parameters()]
    of_torch = torch.get_rng_state().tolist()
    of_python = random.getstate()
    _, keys, *rest = np.random.get_state()
    return weights, of_torch, of_python, keys.tolist(), rest


class Draws(Callback):
    def setup(self, trainer):
        draw()

    on_fit_start = on_epoch_start = on_epoch_end = on_validation_start = on_fit_end = setup

    def on_log(self, trainer, scalars):
        draw()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validate_every_n_steps": 1}, id="validation-at-each-step"),
        pytest.param({"validate_every_n_steps": 4, "validate_at_start": 1}, id="at-start"),
        pytest.param({"callbacks": {"draws": Draws()}, "log_every_n_steps": 1}, id="callback"),
    ],
)
def test_what_is_done_beside_the_updates_changes_nothing_of_the_training(options):
    def end(**given):
        trainer = restless_trainer(**given)
        trainer.fit()
        return state(trainer)

    assert end(**options) == end()


def test_what_is_drawn_is_a_function_of_seed_and_step():
    def drawn(trainer, step):
        trainer.model.drawn = []
        trainer.evaluate(trainer.val_loaders["val"], "val", step=step)
        return trainer.model.drawn

    trainer = restless_trainer(seed=5)
    first = drawn(trainer, None)

    assert len(set(first)) == 2

    torch.rand(3)
    assert drawn(trainer, 0) == first
    assert drawn(trainer, 1) != first
    assert drawn(restless_trainer(seed=6), 0) != first


def test_an_evaluation_that_a_signal_ends_gives_the_generators_back():
    trainer = restless_trainer()

    def signal_comes():
        trainer.state.signal = ("SIGTERM", 143)

    trainer.model.before_evaluation = signal_comes
    before = state(trainer)

    with pytest.raises(EvaluationAbandoned):
        trainer.evaluate(trainer.val_loaders["val"], "val")
    assert state(trainer) == before


def restless_trainer(**options):
    seed_everything(3)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    data = Samples(x, x.sum(1))
    train = loader(data, batch=4)
    val = loader(data, batch=6, shuffled=False)
    options["validate_every_n_epochs"] = None
    return toys.trainer_of(Regression(), train, model=Restless(), val=val, **options)
