"""Throughput and start of DistributedDataParallel: our Trainer, and the same written by hand.

Processes of one thread each, on CPUs; on a machine with fewer cores than processes they share
them. Both contenders run in turn within the same processes. The start is that of whole commands,
from the call to the first update: `train ... strategy=ddp`, and a script by torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from data.images import ImageTensors
from data.loader import Loader
from data.orders import Shuffled
from data.sampler import UpdateSampler
from models.small_cnn import SmallCNN
from scripts.benchmarks.report import Report, Row
from trainer.callback import Callback
from trainer.ddp import DDP
from trainer.gradients import Clipping
from trainer.options import TrainerOptions
from trainer.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH, UPDATES, WARMUP = 128, 30, 10  # samples an update; updates a turn; those not counted
SIZE = 16  # pixels a side
CLASSES = [str(number) for number in range(10)]
PROCESSES = (1, 2)
STARTS = 3
_PLAIN = Path(__file__).with_name("ddp_plain.py")


@dataclass(frozen=True, slots=True)
class Speed:
    """Samples a second of wall time, and of the first process's CPU time."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds to the first update, and CPU seconds of all processes to the end of the command."""

    wall: float
    cpu: float


Speeds = dict[tuple[str, int], list[Speed]]  # by contender and processes


def measure(rounds: int) -> Report:
    """Run both contenders `rounds` times in turn with one and with two processes."""
    speeds: Speeds = {}
    for processes in PROCESSES:
        for name, values in _run(processes, rounds).items():
            speeds[name, processes] = values
    starts = _starts()
    rows = [_row(name, processes, speeds) for processes in PROCESSES for name in _CONTENDERS]
    return Report(
        name="ddp",
        title=f"Samples a second: small_cnn, images of {SIZE} x {SIZE}, {BATCH} an update, gloo",
        unit="samples/s",
        rows=rows,
        headlines={
            "ratio_to_reference": _ratio(speeds, max(PROCESSES), "wall"),
            "cpu_ratio_to_reference": _ratio(speeds, max(PROCESSES), "cpu"),
            "ratio_to_reference_one_process": _ratio(speeds, 1, "wall"),
            "start_ratio_to_torchrun": statistics.median(o.wall / p.wall for o, p in starts),
            "start_cpu_ratio_to_torchrun": statistics.median(o.cpu / p.cpu for o, p in starts),
            "start_seconds": statistics.median(ours.wall for ours, _ in starts),
        },
        settings={"rounds": rounds, "updates": UPDATES, "starts": STARTS},
    )


def _run(processes: int, rounds: int) -> dict[str, list[Speed]]:
    context = multiprocessing.get_context("spawn")
    port, (receiver, sender) = _free_port(), context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(rank, processes, port, rounds, sender))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    sender.close()
    speeds: dict[str, list[Speed]] = receiver.recv()  # EOFError if they fail
    for rank in ranks:
        rank.join()
    return speeds


def _rank(rank: int, processes: int, port: int, rounds: int, results: Connection) -> None:
    """Be one of the processes: run the contenders in turn."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    strategy = DDP("gloo", accelerator="cpu") if processes > 1 else Strategy("cpu")
    strategy.setup()
    speeds: dict[str, list[Speed]] = {name: [] for name in _CONTENDERS}
    for _ in range(rounds):
        for name, contender in _CONTENDERS.items():
            strategy.barrier()
            speeds[name].append(contender(strategy))
    if rank == 0:
        results.send(speeds)
    strategy.teardown()


def _parts() -> tuple[nn.Module, SGD, TensorDataset]:
    torch.manual_seed(0)
    count = BATCH * UPDATES
    samples = torch.randn(count, 1, SIZE, SIZE), torch.randint(10, (count,))
    model = SmallCNN(num_classes=10, in_channels=1)
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9), TensorDataset(*samples)


def by_hand(strategy: Strategy) -> Speed:
    """Train as a person would: DistributedSampler, DDP, clipping, running sums."""
    model, optimizer, samples = _parts()
    wrapped: nn.Module = model
    sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
    if strategy.world_size > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(samples, shuffle=True, seed=0)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        samples, BATCH // strategy.world_size, sampler=sampler, shuffle=sampler is None
    )
    losses, correct = torch.zeros(()), torch.zeros(())
    stamps: list[tuple[float, float]] = []
    for inputs, labels in loader:
        logits = wrapped(inputs)
        loss = cross_entropy(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += loss.detach()
        correct += (logits.detach().argmax(1) == labels).sum()
        stamps.append(_now())
    if strategy.world_size > 1:
        dist.all_reduce(losses)
        dist.all_reduce(correct)
    return _speed(stamps)


class _Stamps(Callback):
    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_update_end(self, trainer: Trainer) -> None:
        self.times.append(_now())


def regimen(strategy: Strategy) -> Speed:
    """Do the same by a Trainer."""
    model, optimizer, samples = _parts()
    sampler = UpdateSampler(
        Shuffled(len(samples), 0),
        batch_size=BATCH,
        rank=strategy.rank,
        world_size=strategy.world_size,
    )
    stamps, (images, labels) = _Stamps(), samples.tensors
    Trainer(
        model,
        Classification(num_classes=10),
        optimizer,
        Loader(ImageTensors(images, labels, CLASSES), sampler, seed=0),
        strategy=strategy,
        callbacks={"stamps": stamps},
        options=TrainerOptions(max_epochs=1, clipping=Clipping(norm=1.0)),
    ).fit()
    return _speed(stamps.times)


_CONTENDERS = {"by hand": by_hand, "Regimen": regimen}


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _speed(stamps: Sequence[tuple[float, float]]) -> Speed:
    """Return samples a second, by the median update: a neighbour's work is in few of them."""
    pairs = list(pairwise(stamps[WARMUP - 1 :]))
    wall, cpu = (statistics.median(b[i] - a[i] for a, b in pairs) for i in (0, 1))
    return Speed(BATCH / wall, BATCH / cpu)


def _row(name: str, processes: int, speeds: Speeds) -> Row:
    own = [speed.wall for speed in speeds[name, processes]]
    label = f"{name}, {processes} process{'es' if processes > 1 else ''}"
    ratio = _ratio(speeds, processes, "wall") if name == "Regimen" else None
    reference = f"by hand, {processes}" if name == "Regimen" else ""
    return Row(label, statistics.median(own), min(own), max(own), ratio, reference)


def _ratio(speeds: Speeds, processes: int, clock: str) -> float:
    """Return the median over the turns of our speed by the reference's."""
    pairs = zip(speeds["Regimen", processes], speeds["by hand", processes], strict=True)
    ratios: list[float] = [getattr(own, clock) / getattr(other, clock) for own, other in pairs]
    return statistics.median(ratios)


class FirstUpdate(Callback):
    """Write down when the first update is done."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_update_end(self, trainer: Trainer) -> None:
        """Write once."""
        if trainer.is_main and trainer.state.updates == 1:
            self._path.write_text(str(time.time()))


def _starts() -> list[tuple[Start, Start]]:
    """Return the seconds to the first update: ours, and those of a script by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        plain = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(_PLAIN), str(mark)]
        ours = [
            *("-m", "scripts.train", "experiment=resnet18", "model=mlp", "loader.num_workers=0"),
            *("strategy=ddp", "strategy.devices=2", "trainer.max_steps=1"),
            *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),
            *("callbacks.checkpoint=null", "callbacks.early_stopping=null", "--allow-target"),
            *(
                "scripts.benchmarks.ddp",
                "+callbacks.mark._target_=scripts.benchmarks.ddp.FirstUpdate",
            ),
            f"+callbacks.mark.path={mark}",
        ]
        return [(_start(ours, mark), _start(plain, mark)) for _ in range(STARTS)]


def _start(arguments: Sequence[str], mark: Path) -> Start:
    mark.unlink(missing_ok=True)
    began, used = time.time(), _cpu_of_children()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=mark.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    return Start(float(mark.read_text()) - began, _cpu_of_children() - used)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
