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


def test_devices_that_are_gone_are_named(monkeypatch):
    state = rng.capture()
    restored = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, device: restored.append(device))
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 3
    notes = rng.restore(state)
    assert restored == [0]
    assert [note.split()[4] for note in notes] == ["cuda:1", "cuda:2"]


def test_a_run_on_the_cpu_does_not_wake_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("initialises CUDA"))
    assert rng.capture()["cuda"] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_numbers_follow_on_a_gpu(tmp_path):
    device = torch.device("cuda")
    torch.rand(1, device=device)
    state = through_a_file(rng.capture(), tmp_path)
    expected = torch.rand(5, device=device)
    rng.restore(state)
    assert torch.equal(torch.rand(5, device=device), expected)
