"""Seeds, switches, random states: saved to the bit, untouched by what is beside the training."""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from toys import Samples, loader
from trainer import rng
from trainer.evaluation import EvaluationAbandoned
from trainer.options import TrainerOptions
from trainer.rng import seed_everything, set_switches
from trainer.tasks.regression import Regression
from trainer.trainer import Trainer


def draw():
    drawn = torch.rand(5).tolist(), [random.random() for _ in range(5)], np.random.rand(5).tolist()
    return *drawn, random.gauss(0, 1), float(np.random.randn())


def through_a_file(state, tmp_path):
    torch.save(state, tmp_path / "rng.pt")
    return torch.load(tmp_path / "rng.pt", weights_only=True)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    state = rng.capture([])
    yield
    set_switches(deterministic=False, cudnn_benchmark=False, tf32=False)
    rng.restore(state, [])


def test_the_same_numbers_follow(tmp_path):
    random.gauss(0, 1)  # leaves the second of a pair behind
    np.random.randn()
    state = through_a_file(rng.capture(), tmp_path)
    expected = draw()
    assert draw() != expected
    assert rng.restore(state) == []
    assert draw() == expected


@pytest.mark.parametrize("part", ["torch", "python", "numpy"])
def test_every_part_matters(tmp_path, part):
    state = through_a_file(rng.capture(), tmp_path)
    expected = draw()
    state[part] = rng.capture()[part]
    rng.restore(state)
    assert draw() != expected


def test_capturing_draws_nothing():
    state = rng.capture()
    rng.capture()
    expected = draw()
    rng.restore(state)
    assert draw() == expected


@pytest.fixture
def states(monkeypatch):
    """The states of GPUs that are not there, by their number."""
    kept = {number: torch.tensor([number]) for number in range(4)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: kept[device.index])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda value, device: kept.update({device.index: value})
    )
    return kept


def gpus(*numbers):
    return [torch.device("cuda", number) for number in numbers]


def test_a_process_keeps_the_state_of_its_own_gpu_and_puts_it_back_where_it_now_computes(states):
    state = rng.capture(gpus(2))
    assert state["cuda"] == [torch.tensor([2])]
    assert rng.restore(state, gpus(1)) == []
    assert {number: int(value) for number, value in states.items()} == {0: 0, 1: 2, 2: 2, 3: 3}


def test_the_current_gpu_stands_for_those_that_are_not_said(states, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert rng.capture()["cuda"] == [torch.tensor([3])]


def test_devices_that_are_gone_are_counted(states):
    state = rng.capture(gpus(0, 1, 2))
    assert rng.restore(state, gpus(3)) == ["the random state of 2 GPUs (this process has 1)"]
    assert int(states[3]) == 0
    assert rng.restore(state, [torch.device("cpu")])[0].startswith("the random state of 3 GPUs")


def test_a_run_on_the_cpu_does_not_wake_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: pytest.fail("initialises CUDA"))
    assert rng.capture()["cuda"] == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert rng.capture([torch.device("cpu")])["cuda"] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_numbers_follow_on_a_gpu(tmp_path):
    device = torch.device("cuda")
    torch.rand(1, device=device)
    state = through_a_file(rng.capture(), tmp_path)
    expected = torch.rand(5, device=device)
    rng.restore(state)
    assert torch.equal(torch.rand(5, device=device), expected)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_seed_repeats_and_the_next_differs(seed):
    seed_everything(seed)
    first = draw()
    seed_everything(seed)
    assert draw() == first
    seed_everything(seed ^ 1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_the_first_rank_has_the_plain_seed_and_the_others_their_own():
    drawn = []
    for rank in range(4):
        seed_everything(7, rank)
        drawn.append(draw())
    torch.manual_seed(7)
    assert torch.rand(5).tolist() == drawn[0][0]
    for part in range(3):
        assert len({str(values[part]) for values in drawn}) == 4


def test_the_switches_are_set_and_reported():
    facts = set_switches(deterministic=False, cudnn_benchmark=True, tf32=True)
    assert facts == {"deterministic": False, "cudnn_benchmark": True, "tf32": True}
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_determinism_excludes_the_benchmark():
    facts = set_switches(deterministic=True, cudnn_benchmark=True, tf32=False)
    assert facts == {"deterministic": True, "cudnn_benchmark": False, "tf32": False}
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_the_user_set_for_cublas_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_switches(deterministic=True, cudnn_benchmark=False, tf32=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("tf32", [False, True])
def test_the_older_tf32_switches_can_be_read_as_well(tf32: bool) -> None:
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    try:
        for value in (not tf32, tf32):
            set_switches(deterministic=False, cudnn_benchmark=False, tf32=value)
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        with torch.backends.cudnn.flags(enabled=False):
            assert not torch.backends.cudnn.enabled
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is tf32
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is tf32  # type: ignore[attr-defined]
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("precision", "tf32", "device", "told"),
    [
        ("fp32", False, "cuda", True),
        ("fp32", True, "cuda", False),
        ("bf16", False, "cuda", False),
        ("fp32", False, "cpu", False),
    ],
)
def test_a_run_says_where_it_is_more_exact_than_torch(
    precision: str, tf32: bool, device: str, told: bool
) -> None:
    remark = rng.tf32_remark(precision, tf32, torch.device(device))
    assert (remark is not None and "convolutions in IEEE" in remark) is told


class Restless(nn.Module):
    """Draws from all generators in every pass, and tells what it drew in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.drawn: list[float] = []
        self.before_evaluation = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.before_evaluation()
        noise = torch.rand(()).item() + random.random() + float(np.random.random())
        if not self.training:
            self.drawn.append(noise)
        out: Tensor = self.linear(x) * (1 + 0.1 * noise)
        return out


def fitted(**options: object) -> Trainer:
    trainer = restless_trainer(**options)
    trainer.fit()
    return trainer


def state(trainer: Trainer) -> tuple[object, ...]:
    _, keys, *rest = np.random.get_state()
    weights = [p.tolist() for p in trainer.model.parameters()]
    return weights, torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validate_every_n_steps": 1}, id="each-step"),
        pytest.param({"validate_every_n_steps": 4, "validate_at_start": 1}, id="at-start"),
    ],
)
def test_a_validation_changes_nothing_of_the_training(options: dict[str, object]) -> None:
    assert state(fitted(**options)) == state(fitted())


def test_what_is_drawn_is_a_function_of_seed_and_step() -> None:
    trainer = restless_trainer(seed=5)
    model, evaluate = trainer.model, trainer.evaluate

    def drawn(step: int | None) -> list[float]:
        model.drawn = []  # type: ignore[assignment]
        evaluate(trainer.val_loader, "val", step=step)
        return model.drawn  # type: ignore[return-value]

    first = drawn(None)
    assert len(set(first)) == 2
    assert drawn(0) == first
    torch.rand(3)
    assert drawn(0) == first
    assert drawn(1) != first
    other = restless_trainer(seed=6)
    other.evaluate(other.val_loader, "val")
    assert other.model.drawn != first


def test_an_evaluation_that_a_signal_ends_gives_the_generators_back() -> None:
    trainer = restless_trainer()

    def signal_comes() -> None:
        trainer.state.signal = ("SIGTERM", 143)

    trainer.model.before_evaluation = signal_comes
    before = state(trainer)
    with pytest.raises(EvaluationAbandoned):
        trainer.evaluate(trainer.val_loader, "val")
    assert state(trainer) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_keeps_its_generator_too() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.get_rng_state(device)
    with rng.keyed(device, 1):
        first = torch.rand(3, device=device)
    with rng.keyed(device, 1):
        assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(torch.cuda.get_rng_state(device), before)


def restless_trainer(**options: Any) -> Trainer:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(7))
    data = Samples(x, x.sum(1))
    model = Restless()
    return Trainer(
        model,
        Regression(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader(data, batch=4),
        loader(data, batch=6, shuffled=False),
        options=TrainerOptions(max_epochs=2, validate_every_n_epochs=None, **options),
    )
