"""Examples of the gallery, built in float64 or trained as a command."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import Experiment, build
from same_run import differences

ROOT = Path(__file__).resolve().parents[2]


def command_of(example: str) -> list[str]:
    """Return the arguments of `train` for an example."""
    return ["--config-dir", f"{ROOT}/examples/{example}/conf", f"experiment={example}"]


def built(example: str, *overrides: str) -> Experiment:
    """Return an example's experiment in float64, with nothing that draws or writes."""
    fixed = ["trainer.precision=fp64", "callbacks=none"]
    return build(compose([*command_of(example), *fixed, *overrides]).config)


def assert_same_state(trained: nn.Module, by_hand: nn.Module) -> None:
    """Compare parameters and buffers, to 1e-10."""
    expected = by_hand.state_dict()
    for name, values in trained.state_dict().items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-10, msg=name)


def check_resume(train: Any, folder: Path, command: list[str], step: int) -> Path:
    """Compare a run with one that goes on from a step; return the first, which saves there."""
    command = [
        *command,
        "trainer.log_every_n_steps=2",
        "callbacks.checkpoint.save_top_k=-1",
        f"callbacks.checkpoint.every_n_steps={step}",
    ]
    whole = folder / "whole"
    train([*command, f"run_dir={whole}"], folder=ROOT)
    resumed = shutil.copytree(whole, folder / "resumed")
    middle = resumed / "checkpoints" / f"step-{step:08}.pt"
    train([*command, f"resume={middle}"], folder=ROOT)
    assert differences(whole, resumed, but=["config"]) == []
    return whole


def check_short_resume(train: Any, folder: Path, example: str) -> None:
    """Compare two epochs of six updates with a run that goes on from the fourth."""
    short = [
        "trainer.max_epochs=2",
        "trainer.limit_train_batches=6",
        "trainer.limit_val_batches=2",
        "trainer.limit_test_batches=1",
    ]
    check_resume(train, folder, [*command_of(example), *short], step=4)
