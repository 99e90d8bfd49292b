"""DataParallel: what it does without GPUs, and that uneven shards make the exact mean."""

import threading

import pytest
import torch
from torch import nn

from trainer import rng
from trainer.errors import ResourceError
from trainer.options import TrainerOptions
from trainer.strategies import strategy as dp
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


class Chunks(nn.Module):
    """Stand in for nn.DataParallel without GPUs: compute uneven parts, and gather them."""

    def __init__(self, module, device_ids, output_device, dim):
        super().__init__()
        self.module, self.devices, self.dim = module, len(device_ids), dim

    def forward(self, inputs):
        parts = inputs.chunk(self.devices, self.dim)  # of 10 samples: 4, 4, 2
        return torch.cat([self.module(part) for part in parts], self.dim)


def weights(strategy):
    torch.manual_seed(0)
    model = strategy.prepare(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(10, 4, generator=generator).double(), torch.randint(3, (10,)))
        for _ in range(3)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = TrainerOptions(max_epochs=2)
    Trainer(model, Classification(3), optimizer, batches, strategy=strategy, options=options).fit()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(nn, "DataParallel", Chunks)


def test_uneven_shards_make_the_exact_mean(three_gpus, monkeypatch):
    monkeypatch.setattr(dp.DataParallel, "computing", [])  # whose random states a run keeps
    strategy = dp.DataParallel()
    strategy.device = torch.device("cpu")
    assert strategy.explain() is None
    assert strategy.devices == 3
    for one, other in zip(weights(Strategy("cpu")), weights(strategy), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({}, [0, 1, 2], id="all"),
        pytest.param({"devices": 2}, [0, 1], id="count"),
        pytest.param({"devices": [2, 0]}, [2, 0], id="numbers"),
        pytest.param({"devices": 2, "device_ids": [1, 2]}, [1, 2], id="device_ids"),
    ],
)
def test_devices(three_gpus, arguments, expected):
    strategy = dp.DataParallel(**arguments)
    assert strategy.device_ids == expected
    assert strategy.device == torch.device("cuda", expected[0])


def test_a_gpu_that_is_not_there(three_gpus):
    with pytest.raises(ResourceError, match=r"device_ids=\[0, 3\].* 3 GPUs and no 3"):
        dp.DataParallel(device_ids=[0, 3])


def test_without_gpus_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    strategy = dp.DataParallel(devices=2)
    model = nn.Linear(2, 2)
    assert strategy.wrap(model) is model
    assert "no second GPU" in strategy.explain()


class Threads(Chunks):
    """Compute parts in threads, as nn.DataParallel does, which tells them that there is autocast
    but not in which format."""

    def forward(self, inputs):
        parts, results = inputs.chunk(self.devices, self.dim), {}
        enabled = torch.is_autocast_enabled("cpu")

        def compute(number):
            with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
                results[number] = self.module(parts[number])

        threads = [threading.Thread(target=compute, args=(n,)) for n in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([results[number] for number in range(len(parts))], self.dim)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        pytest.param(None, torch.float32, id="no autocast"),
        pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
    ],
)
def test_replicas_compute_in_the_format_of_the_run(three_gpus, monkeypatch, dtype, expected):
    monkeypatch.setattr(nn, "DataParallel", Threads)
    strategy = dp.DataParallel()
    strategy.device = torch.device("cpu")
    wrapped = strategy.wrap(nn.Linear(4, 3))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        assert wrapped(torch.randn(6, 4)).dtype == expected
    assert wrapped(torch.randn(6, 4)).dtype == torch.float32


def test_the_cpu_can_be_asked_for(three_gpus):
    strategy = dp.DataParallel(accelerator="cpu")
    assert strategy.device == torch.device("cpu")
    assert strategy.device_ids == []
    assert strategy.devices == 1


def test_each_gpu_of_the_process_has_a_random_state(three_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([device.index]))
    state = rng.capture(dp.DataParallel(devices=[2, 0]).computing)
    assert [int(own) for own in state["cuda"]] == [2, 0]
