"""What the steps train: experiments that are built, in this process or in one of their own."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.checks import SIMULATED
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import Experiment, build
from regimen.trainer.callback import Callback
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.trainer import Trainer

CPU = torch.device("cpu")
# The network of most steps, and no more of it than the simulated device computes in a second.
SMALL = ["model=small_cnn", *(["model.widths=[4,8]"] if SIMULATED else [])]


def command(name: str, words: Sequence[str]) -> list[str]:
    """Return the command line of `train`, `evaluate` or `predict`, with nothing installed."""
    return [sys.executable, "-m", "regimen", name, *words]


def run(name: str, words: Sequence[str]) -> int:
    """Run a command to its end and return its exit code."""
    print("$", name, *words, flush=True)
    return subprocess.run(command(name, words), check=False).returncode


def built(
    words: Sequence[str],
    device: torch.device,
    callbacks: Mapping[str, Callback] | None = None,
    run_dir: Path | None = None,
) -> Experiment:
    """Build an experiment on a device; `run_dir` is where its callbacks write."""
    strategy = Strategy(device)
    strategy.setup()
    experiment = build(parse(compose(list(words)).config), strategy, callbacks)
    experiment.trainer.use_run_dir(run_dir)
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    return experiment


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the model's state in host memory."""
    state = trainer.model.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def distance(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two states by the norm of the second; in float64."""
    difference = total = 0.0
    for name, tensor in others.items():
        difference += (ours[name].double() - tensor.double()).square().sum().item()
        total += tensor.double().square().sum().item()
    return float((difference / total) ** 0.5)


def equal(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Return whether two states are the same to the bit."""
    return ours.keys() == others.keys() and all(
        torch.equal(tensor, others[name]) for name, tensor in ours.items()
    )


class Losses(Callback):
    """Note the loss of each log line."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, trainer: Trainer, scalars: Mapping[str, Any]) -> None:
        """Note it."""
        if "train/loss" in scalars:
            self.values.append(float(scalars["train/loss"]))
