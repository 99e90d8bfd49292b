"""One seed decides all generators; the switches are what they are said to be."""

import os
import random

import numpy as np
import pytest
import torch

from trainer import rng
from trainer.rng import seed_everything, set_switches


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    state = rng.capture()
    yield
    set_switches(deterministic=False, cudnn_benchmark=False, tf32=False)
    rng.restore(state)


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()


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
    assert torch.rand(3).tolist() == drawn[0][0]
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
