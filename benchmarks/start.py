"""How long whole commands take: to the first update, to print help, to tell a mistake.

The reference is a bare script, which is this module as a command: torch, torchvision, one update
(`ddp` starts two of it by torchrun). Times are by the clock, ratios by the CPU's time of the
process up to the mark, which other processes change less.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks import report
from benchmarks.report import Cost, Report

MOST_ROUNDS = 10
BARE = ("-m", "benchmarks.start")
TRAIN = ("-m", "scripts.train", "experiment=resnet18")
FIRST_UPDATE = (
    *("model=mlp", "optimizer=sgd_nesterov", "trainer.max_steps=1", "trainer.limit_val_batches=0"),
    *("trainer.limit_test_batches=0", "callbacks.checkpoint=null"),
    *("callbacks.early_stopping=null", "--allow-target", "benchmarks.ours"),
    *("+callbacks.mark._target_=benchmarks.ours.Mark", "+callbacks.mark.path={}"),
)


def bare(mark: Path) -> None:
    """Train for one update, and note when it is done."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = cross_entropy(model(torch.rand(128, 1, 16, 16)), torch.zeros(128).long())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mark.write_text(f"{time.time()} {time.process_time()}")


def bare_ddp(mark: Path) -> None:
    """Do what a person writes for torchrun: one update of two processes."""
    from sklearn.datasets import load_digits
    from torch.utils.tensorboard import SummaryWriter
    from torchvision.transforms import v2
    from tqdm import tqdm

    dist.init_process_group("gloo")
    digits, main = load_digits(), dist.get_rank() == 0
    shift = v2.RandomAffine(0, translate=(0.1, 0.1))
    images = torch.tensor(digits.images, dtype=torch.float32)
    samples = TensorDataset(images, torch.tensor(digits.target))
    loader = DataLoader(samples, 32, sampler=DistributedSampler(samples))
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    writer = SummaryWriter(str(mark.with_name("plain"))) if main else None
    for inputs, labels in tqdm(loader, disable=not main):
        loss = cross_entropy(model(shift(inputs)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if writer is not None:
            writer.add_scalar("train/loss", loss.item(), 1)
            mark.write_text(f"{time.time()} {time.process_time()}")
        break
    dist.destroy_process_group()


def measure(rounds: int) -> Report:
    """Start every command `rounds` times, at most 10, in turn, and compare."""
    rounds = min(rounds, MOST_ROUNDS)
    # The uncounted turn warms the file cache and compiles.
    wall, cpu = report.split(report.in_turn(COMMANDS, rounds))
    first, bare_first = "train: first update", "bare script: first update"
    help_of_bare = "bare script: --help"
    references = {name: help_of_bare for name in COMMANDS if name.startswith("train")}
    return Report(
        name="start",
        title="Whole commands, by the clock",
        unit="s",
        rows=report.compared(wall, {**references, first: bare_first}),
        headlines={
            "ratio_to_handwritten": report.paired(wall[first], wall[bare_first]),
            "cpu_ratio_to_handwritten": report.paired(cpu[first], cpu[bare_first]),
            "cpu_seconds_help": min(cpu["train --help"]),
            "cpu_seconds_mistake": min(cpu["train: a mistake"]),
            "cpu_seconds_argument": min(cpu["train: a wrong argument"]),
        },
        settings={"rounds": rounds},
    )


def to_mark(arguments: Sequence[str], whole_cpu: bool = False) -> Cost:
    """Return what a command took to its first update, or of CPU seconds the whole command's."""
    before = report.children_cpu()
    with tempfile.TemporaryDirectory() as folder:
        mark, began = Path(folder) / "mark", time.time()
        run_command([word.replace("{}", str(mark)) for word in arguments], folder)
        ended, used = map(float, mark.read_text().split())
    return Cost(ended - began, report.children_cpu() - before if whole_cpu else used)


def whole(arguments: Sequence[str], code: int) -> Cost:
    """Return what a whole command took."""
    used, began = report.children_cpu(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        run_command(arguments, folder, code)
    return Cost(time.time() - began, report.children_cpu() - used)


def run_command(arguments: Sequence[str], folder: str, code: int = 0) -> None:
    """Run Python with arguments in a folder. Raises RuntimeError: another code."""
    words, environment = [sys.executable, *arguments], command_environment()
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode != code:
        raise RuntimeError(f"{' '.join(arguments)} ended with {ended.returncode}: {ended.stderr}")


@functools.cache
def command_environment() -> dict[str, str]:
    """Return an environment where bytecode is kept, as at a user's, but in a folder apart."""
    folder = tempfile.mkdtemp(prefix="regimen-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder}


COMMANDS: dict[str, Callable[[], Cost]] = {
    "bare script: first update": partial(to_mark, (*BARE, "{}")),
    "train: first update": partial(to_mark, (*TRAIN, *FIRST_UPDATE)),
    "bare script: --help": partial(whole, (*BARE, "--help"), 0),
    "train --help": partial(whole, (*TRAIN[:2], "--help"), 0),
    "train: a mistake": partial(whole, (*TRAIN, "trainer.max_epoch=1"), 2),
    "train: a wrong argument": partial(whole, (*TRAIN, "optimizer.lrr=1"), 2),
}

if __name__ == "__main__":
    import torchvision  # noqa: F401 (most scripts have its transforms)

    parser = argparse.ArgumentParser()
    parser.add_argument("mark", type=Path)
    (bare_ddp if "RANK" in os.environ else bare)(parser.parse_args().mark)
