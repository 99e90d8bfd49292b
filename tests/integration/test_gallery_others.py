"""Examples beside the usual: a strategy, and tasks that compare, imitate or learn to learn."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.hogwild.strategy import SeldomAgreeing, _share
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.distributed import Group
from regimen.trainer.state import TrainState
from same_run import logged

ROOT = Path(__file__).resolve().parents[2]


def command_of(example):
    return ["--config-dir", f"{ROOT}/examples/{example}/conf", f"experiment={example}"]


def last_values(run):
    return {key: value for line in logged(run) for key, value in line.items()}


# examples/hogwild
HOGWILD = [*command_of("hogwild"), "trainer.max_epochs=3", "strategy.timeout=60"]


@pytest.mark.slow
def test_two_processes_train_one_model_and_a_resume_goes_on(train, tmp_path):
    whole = tmp_path / "whole"
    save = ["callbacks.checkpoint.every_n_steps=20", "callbacks.checkpoint.save_top_k=-1"]
    train([*HOGWILD, *save, f"run_dir={whole}"], folder=ROOT)
    assert last_values(whole)["val/accuracy"] > 0.6
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    middle = resumed / "checkpoints" / "step-00000020.pt"
    train([*HOGWILD, *save, f"resume={middle}"], folder=ROOT)
    assert last_values(resumed)["step"] == 60
    assert last_values(resumed)["val/accuracy"] > 0.6
    counted = torch.load(resumed / "checkpoints" / "last.pt", weights_only=True)["state"]
    assert counted["counters"]["samples"] == 3 * 1257


@pytest.mark.slow
def test_a_process_whose_gradient_is_not_finite_ends_all(train, tmp_path):
    places = [f"run_dir={tmp_path / 'run'}", "optimizer.lr=1e30"]
    done = train([*HOGWILD, *places, "trainer.on_nonfinite=skip"], 5, folder=ROOT)
    assert "is not finite, and strategy=hogwild leaves no update out" in done.error


def test_steps_of_two_owners_change_the_same_weights(tmp_path):
    layers = [nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    start = layers[0].weight.detach().clone()
    for number, layer in enumerate(layers):
        _share(layer.weight, tmp_path / "weight", writes=number == 0)
    for layer in layers:
        layer.weight.sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert torch.equal(layers[0].weight, layers[1].weight)
    torch.testing.assert_close(layers[0].weight, start - 2 * 0.5)
    assert layers[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_processes_ask_each_other_at_agreed_updates_only(monkeypatch):
    asked = []
    monkeypatch.setattr(Group, "agree_on_stop", lambda self, state, at_once: asked.append(calls))
    group = SeldomAgreeing(timeout=60.0, agree_every=4)
    for calls in range(1, 11):
        group.agree_on_stop(TrainState(), at_once=calls == 6)
    assert asked == [4, 6, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.agree_every=0"], r"strategy\.agree_every: expected a number of updates >= 1"),
        (["strategy.accelerator=cuda"], r"strategy\.accelerator: .* memory of the CPU, got 'cuda'"),
        (["strategy.devices=0"], r"strategy\.devices: expected a number >= 1"),
        (
            ["callbacks=[default,ema]"],
            r"callbacks\.ema: .*the weights that all processes of .*train",
        ),
    ],
)
def test_mistakes_of_hogwild_are_found_before_processes_start(words, message):
    with pytest.raises(ConfigError, match=message):
        check_targets(parse(compose([*HOGWILD, *words]).config))
