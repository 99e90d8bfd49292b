"""A captured state gives back the very numbers, also through a checkpoint file."""

import random

import numpy as np
import pytest
import torch

from trainer import rng


def draw():
    return (
        torch.rand(5).tolist(),
        [random.random() for _ in range(5)],
        random.gauss(0, 1),
        np.random.rand(5).tolist(),
        float(np.random.randn()),
    )


def through_a_file(state, tmp_path):
    torch.save(state, tmp_path / "rng.pt")
    return torch.load(tmp_path / "rng.pt", weights_only=True)


@pytest.fixture(autouse=True)
def unchanged():
    state = rng.capture()
    yield
    rng.restore(state)


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
