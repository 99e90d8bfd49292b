"""Devices that are asked for and those that are there; several GPUs in one process."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regimen.conf.check import parse
from regimen.conf.schema_trainer import STRATEGIES
from regimen.data.loading.workers import workers_of
from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.composition.compose import compose
from regimen.scripts.runs.launch import launch
from regimen.trainer import device
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.components.precision import Precision
from regimen.trainer.errors import ModelError, ResourceError
from regimen.trainer.strategies import data_parallel as dp
from regimen.trainer.tasks.classification import Classification
from toys import CLASSES, assert_equal, by_hand, of_output, points, trainer_of


def config(*overrides):
    return parse(compose(parse_arguments(list(overrides))).config)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_an_accelerator_that_is_not_there(strategy):
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ModelError, match="accelerator: this machine has no cuda"):
        build_strategy(config(f"strategy={strategy}", "strategy.accelerator=cuda"))


def test_a_group_of_numbered_devices_is_planned_on_a_cpu_as_it_would_train_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = build_strategy(config("strategy=ddp", "strategy.devices=[0,1]"))
    assert planned.devices == 2
    assert planned.device.type == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"devices": 100000}, r"strategy\.devices=100000: .* GiB", id="too many"),
        pytest.param({"devices": 2, "backend": "nccl"}, "backend=nccl", id="nccl without a GPU"),
        pytest.param({"backend": "mpi"}, "backend=mpi .* build of torch", id="a build without mpi"),
    ],
)
def test_a_machine_is_asked_before_a_process_is_started(monkeypatch, changes, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    strategy = {"_target_": STRATEGIES["ddp"], "devices": 2, **changes}
    with pytest.raises(ResourceError, match=message):
        launch(SimpleNamespace(config={"strategy": strategy}))


@pytest.mark.parametrize(
    ("hip", "set_to", "expected"),
    [
        pytest.param(None, {"CUDA": "3,5"}, ("CUDA", ["3", "5"]), id="CUDA"),
        pytest.param(None, {"HIP": "7,8"}, ("CUDA", ["0", "1"]), id="no ROCm"),
        pytest.param("6.4", {"HIP": "3,5", "CUDA": "0"}, ("HIP", ["3", "5"]), id="ROCm"),
        pytest.param("6.4", {"ROCR": "3,5"}, ("CUDA", ["0", "1"]), id="ROCm by its runtime"),
    ],
)
def test_a_job_is_given_its_device_by_the_variable_that_counts(monkeypatch, hip, set_to, expected):
    for name in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device, "device_types", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(device, "device_count", lambda kind="auto": 2)
    variable, names = expected

    assert device.visible() == (f"{variable}_VISIBLE_DEVICES", names)


@pytest.mark.parametrize(
    ("selector", "mask", "expected"),
    [
        ("", "", ("ZE_AFFINITY_MASK", ["0", "1"])),
        ("", "2,3", ("ZE_AFFINITY_MASK", ["2", "3"])),
        ("level_zero:gpu", "", ("ZE_AFFINITY_MASK", ["0", "1"])),
        ("*:*", "2,3", ("ZE_AFFINITY_MASK", ["2", "3"])),
        ("level_zero:1,3", "", ("ONEAPI_DEVICE_SELECTOR", ["level_zero:1", "level_zero:3"])),
        ("level_zero:1;level_zero:0.1", "4,5", ("ONEAPI_DEVICE_SELECTOR", None)),
    ],
)
def test_a_job_of_a_selection_of_intels_is_given_a_part_of_it(
    monkeypatch, selector, mask, expected
):
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", selector)
    monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
    monkeypatch.setattr(device, "device_types", lambda: ["xpu", "cpu"])
    monkeypatch.setattr(device, "device_count", lambda kind="auto": 2)
    variable, names = expected

    assert device.visible() == (variable, names or ["level_zero:1", "level_zero:0.1"])


def test_workers_share_the_cores(monkeypatch):
    assert workers_of(16) == 16

    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert workers_of("auto") == 8

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert workers_of("auto") == 3

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "12")
    assert workers_of("auto") == 0  # one core each computes


class Chunks(nn.Module):
    """Stand in for nn.DataParallel without GPUs: compute uneven parts in threads, and gather them.

    It tells the threads, too, that there is autocast but not in which format.
    """

    def __init__(self, module, device_ids, output_device, dim):
        super().__init__()
        self.module = module
        self.devices = len(device_ids)
        self.dim = dim

    def forward(self, inputs):
        enabled = torch.is_autocast_enabled("cpu")

        def compute(part):
            with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
                return self.module(part)

        with ThreadPoolExecutor(self.devices) as pool:  # of 8 samples: 3, 3, 2
            return torch.cat([*pool.map(compute, inputs.chunk(self.devices, self.dim))], self.dim)


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(dp, "device_count", lambda kind: 3)
    monkeypatch.setattr(nn, "DataParallel", Chunks)


def test_uneven_shards_make_the_exact_mean(three_gpus):
    strategy = dp.DataParallel()
    strategy.local_devices = []  # whose random states a run keeps
    strategy.device = torch.device("cpu")

    assert strategy.explain() is None
    assert strategy.devices == 3

    loss = nn.CrossEntropyLoss()
    trainer = trainer_of(Classification(CLASSES, loss), points(), strategy=strategy)
    trainer.fit()

    assert_equal(trainer.model, by_hand(of_output(loss), points()))


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


def test_a_number_that_is_not_there(three_gpus):
    with pytest.raises(ResourceError, match=r"device_ids=\[0, 4\].* 3 GPUs and no 4"):
        dp.DataParallel(device_ids=[0, 4])


def test_without_gpus_it_says_so(monkeypatch):
    monkeypatch.setattr(dp, "device_count", lambda kind: 0)
    strategy = dp.DataParallel(devices=2)
    model = nn.Linear(2, 2)

    assert strategy.wrap(model) is model
    assert "no second GPU" in strategy.explain()


@pytest.mark.parametrize(
    ("precision", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_replicas_compute_in_the_format_of_the_run(three_gpus, precision, expected):
    strategy = dp.DataParallel()
    strategy.device = torch.device("cpu")
    strategy.autocast = Precision(precision).autocast
    wrapped = strategy.wrap(nn.Linear(4, 3))
    with strategy.autocast():
        assert wrapped(torch.randn(6, 4)).dtype == expected
