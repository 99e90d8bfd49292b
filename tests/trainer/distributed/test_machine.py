"""Devices that are asked for and those that are there, before anything is started or touched."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from conf.check import parse
from conf.errors import ConfigError
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from scripts.runs.launch import launch
from trainer.assembly import experiment as build_data
from trainer.assembly.parts import build_strategy
from trainer.distributed import processes as distributed
from trainer.distributed.processes import ProcessGroup
from trainer.errors import ModelError, ResourceError
from trainer.strategies.fsdp import FSDP
from trainer.strategies.strategy import Strategy, check_processes, check_workers


def config(*overrides):
    return parse(compose(parse_arguments(list(overrides))).config)


@pytest.fixture
def two_gpus(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def set_device(device):
        assert device.index is not None, "torch.cuda.set_device needs an index"
        chosen.append(device)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return chosen


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["strategy.accelerator=cuda"], 0, id="the first"),
        pytest.param(["strategy.accelerator=cuda", "strategy.devices=[1]"], 1, id="by number"),
        pytest.param(["strategy.devices=[1]"], 1, id="auto, by number"),
        pytest.param(["strategy=ddp", "strategy.accelerator=cuda"], 0, id="group in one process"),
        pytest.param(["strategy=ddp", "strategy.devices=[1,0]"], 1, id="group by numbers"),
        pytest.param(["strategy=dp", "strategy.accelerator=cuda"], 0, id="dp"),
    ],
)
def test_a_gpu_has_a_number(two_gpus, overrides, expected):
    strategy = build_strategy(config(*overrides))
    strategy.setup()
    assert two_gpus == [torch.device("cuda", expected)]


def test_strategies_of_users_may_say_cuda(two_gpus):
    Strategy("cuda").setup()
    assert two_gpus == [torch.device("cuda", 0)]


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_an_accelerator_that_is_not_there(strategy):
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ModelError, match="accelerator: this machine has no cuda"):
        build_strategy(config(f"strategy={strategy}", "strategy.accelerator=cuda"))


def test_a_group_of_numbered_devices_is_planned_on_a_cpu_as_it_would_train_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = build_strategy(config("strategy=ddp", "strategy.devices=[0,1]"))
    assert (planned.devices, planned.device.type) == (2, "cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["strategy.devices=2"], r"strategy\.devices: 2 devices need", id="two"),
        pytest.param(["strategy.devices=[0,1]"], "2 devices need", id="two by number"),
        pytest.param(["strategy=ddp", "strategy.devices=[0,0]"], "a device twice", id="twice"),
        pytest.param(["strategy=dp", "strategy.device_ids=[1,1]"], "a device twice", id="dp"),
        pytest.param(
            ["strategy=ddp", "strategy.accelerator=cpu", "strategy.backend=nccl"],
            r"strategy\.backend: nccl connects GPUs",
            id="nccl on CPUs",
        ),
    ],
)
def test_what_contradicts_itself_is_a_config_error(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"devices": 100000}, r"strategy\.devices=100000: .* GiB", id="too many"),
        pytest.param({"devices": 2, "backend": "nccl"}, "backend=nccl", id="nccl without a GPU"),
    ],
)
def test_a_machine_is_asked_before_a_process_is_started(monkeypatch, changes, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    strategy = {"devices": 2, "accelerator": "auto", "backend": "auto", **changes}
    with pytest.raises(ResourceError, match=message):
        launch(SimpleNamespace(config={"strategy": strategy}))


def test_more_processes_than_gpus(two_gpus):
    with pytest.raises(ResourceError, match=r"devices=3: this machine has 2 GPUs"):
        check_processes(3)
    check_processes(2)
    check_processes(3, "cpu")


def test_workers_beyond_the_machine(monkeypatch):
    check_workers(16)
    with pytest.raises(ResourceError, match=r"loader\.num_workers=100000: 100000 workers"):
        check_workers(100000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ResourceError, match=r"num_workers=100000: 400000 workers"):
        check_workers(100000)


@pytest.mark.parametrize(
    ("device", "asked", "pinned"),
    [
        pytest.param("cpu", None, False, id="a context on a GPU that has no part in it"),
        pytest.param("cpu", True, False, id="there is nothing to pin for"),
        pytest.param("cuda", None, True, id="by itself"),
        pytest.param("cuda", False, False, id="refused"),
    ],
)
def test_memory_is_pinned_for_gpus_only(monkeypatch, device, asked, pinned):
    given = {}
    monkeypatch.setattr(build_data, "Loader", lambda *_, **options: given.update(options))
    pin = "null" if asked is None else asked
    options = config("data=digits", f"loader.pin_memory={pin}")
    build_data._loader(options, None, None, Strategy(device), "raise")
    assert given["pin_memory"] is pinned


class Stop(Exception):  # noqa: N818 (not an error)
    """The group would be made now."""


@pytest.mark.parametrize("on_gpus", [True, False])
def test_hosts_tire_before_the_watchdog_of_gpus(monkeypatch, on_gpus):
    """It kills the process that waits; hosts say in words who is silent."""
    found = {}

    def init(backend, **options):
        found.update(options)
        raise Stop

    monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    monkeypatch.setattr(distributed, "settle_attempt", lambda *_: None)
    monkeypatch.setattr(distributed, "Board", lambda *_: None)
    monkeypatch.setattr(distributed, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    group = ProcessGroup("gloo", timeout=30)
    with pytest.raises(Stop):
        group.join(torch.device("cuda", 0) if on_gpus else torch.device("cpu"))
    assert found["timeout"] == timedelta(seconds=90 if on_gpus else 30)


@pytest.mark.parametrize(
    ("offload", "backend", "on_host"),
    [
        pytest.param(True, "cpu:gloo,cuda:nccl", True, id="offloaded"),
        pytest.param(False, "nccl", False, id="on the GPU"),
    ],
)
def test_offloaded_shards_have_a_backend_between_hosts(
    two_gpus, monkeypatch, offload, backend, on_host
):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    strategy = FSDP(cpu_offload=offload)
    assert strategy.group.backend == backend
    assert strategy.updates_on_host is on_host
    assert "RANK" not in os.environ
