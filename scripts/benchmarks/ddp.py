"""Throughput and start of DistributedDataParallel: our Trainer, and the same written by hand.

Processes of one thread each, by gloo on CPUs or by nccl on as many GPUs; with fewer cores than
processes they share them. All contenders run in turn within the same processes. One process also
runs with the wrapper and without, which shows what it costs.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from data.images import ImageTensors
from data.loading.loader import Loader
from data.orders import Shuffled
from data.updates import UpdateSampler
from models.small_cnn import SmallCNN
from scripts.benchmarks.ddp_start import STARTS, measure_starts
from scripts.benchmarks.report import Report, Row
from trainer.callback import Callback
from trainer.options import Clipping, TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.replicas import Processes
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH, UPDATES, WARMUP = 128, 60, 10  # samples an update; updates a turn; those not counted
SIZE = 16  # pixels a side
CLASSES = [str(number) for number in range(10)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSES = (1, 2) if DEVICE == "cpu" or torch.cuda.device_count() > 1 else (1,)


@dataclass(frozen=True, slots=True)
class Speed:
    """Samples a second of wall time, and of the first process's CPU time."""

    wall: float
    cpu: float


Speeds = dict[tuple[str, int], list[Speed]]  # by contender and processes


def measure(rounds: int) -> Report:
    """Run both contenders `rounds` times in turn with one and with two processes."""
    speeds: Speeds = {}
    for processes in PROCESSES:
        for name, values in _run(processes, rounds).items():
            speeds[name, processes] = values
    starts = measure_starts()
    rows = [_row(name, processes, speeds) for name, processes in speeds]
    return Report(
        name="ddp",
        title=f"Samples a second: small_cnn, images of {SIZE} x {SIZE}, {BATCH} an update",
        unit="samples/s",
        rows=rows,
        headlines={
            "ratio_to_reference": _ratio(speeds, max(PROCESSES), "wall"),
            "cpu_ratio_to_reference": _ratio(speeds, max(PROCESSES), "cpu"),
            "ratio_to_reference_one_process": _ratio(speeds, 1, "wall"),
            "ratio_of_wrapped_to_single": _ratio(speeds, 1, "wall", "Regimen, wrapped", "Regimen"),
            "start_ratio_to_torchrun": statistics.median(o.wall / p.wall for o, p in starts),
            "start_cpu_ratio_to_torchrun": statistics.median(o.cpu / p.cpu for o, p in starts),
            "start_seconds": statistics.median(ours.wall for ours, _ in starts),
        },
        settings={"rounds": rounds, "device": DEVICE, "updates": UPDATES, "starts": STARTS},
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
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # as launchers set it
    strategy = DDP(Processes(accelerator=DEVICE))
    strategy.setup()
    contenders = _contenders(strategy)
    speeds: dict[str, list[Speed]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            strategy.group.barrier()
            speeds[name].append(contender())
    if rank == 0:
        results.send(speeds)
    strategy.group.leave()


def _contenders(strategy: DDP) -> dict[str, Callable[[], Speed]]:
    if strategy.group.world_size > 1:
        return {"by hand": partial(by_hand, strategy), "Regimen": partial(regimen, strategy)}
    alone = Strategy(strategy.device)
    return {
        "by hand": partial(by_hand, alone),
        "Regimen": partial(regimen, alone),
        "Regimen, wrapped": partial(regimen, strategy),
    }


def _parts(device: torch.device) -> tuple[nn.Module, SGD, TensorDataset]:
    torch.manual_seed(0)
    count = BATCH * UPDATES
    samples = torch.randn(count, 1, SIZE, SIZE), torch.randint(10, (count,))
    model = SmallCNN(num_classes=10, in_channels=1).to(device)
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9), TensorDataset(*samples)


def by_hand(strategy: Strategy) -> Speed:
    """Train as a person would: DistributedSampler, DDP, clipping, running sums."""
    model, optimizer, samples = _parts(strategy.device)
    wrapped: nn.Module = model
    sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
    if strategy.group.world_size > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(samples, shuffle=True, seed=0)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        samples, BATCH // strategy.group.world_size, sampler=sampler, shuffle=sampler is None
    )
    losses, correct = (torch.zeros((), device=strategy.device) for _ in range(2))
    stamps: list[tuple[float, float]] = []
    for batch in loader:
        inputs, labels = (t.to(strategy.device, non_blocking=True) for t in batch)
        logits = wrapped(inputs)
        loss = cross_entropy(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += loss.detach()
        correct += (logits.detach().argmax(1) == labels).sum()
        stamps.append(_now())
    if strategy.group.world_size > 1:
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
    model, optimizer, samples = _parts(strategy.device)
    sampler = UpdateSampler(
        Shuffled(len(samples), 0),
        batch_size=BATCH,
        rank=strategy.group.rank,
        world_size=strategy.group.world_size,
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


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _speed(stamps: Sequence[tuple[float, float]]) -> Speed:
    """Return samples a second, by the median update: a neighbour's work is in few of them.

    A GPU works on after the host has gone on: there it is the mean, up to the end of its work.
    """
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        first, last = stamps[WARMUP - 1], _now()
        wall, cpu = ((last[i] - first[i]) / (len(stamps) - WARMUP) for i in (0, 1))
        return Speed(BATCH / wall, BATCH / cpu)
    pairs = list(pairwise(stamps[WARMUP - 1 :]))
    wall, cpu = (statistics.median(b[i] - a[i] for a, b in pairs) for i in (0, 1))
    return Speed(BATCH / wall, BATCH / cpu)


def _row(name: str, processes: int, speeds: Speeds) -> Row:
    own = [speed.wall for speed in speeds[name, processes]]
    label = f"{name}, {processes} process{'es' if processes > 1 else ''}"
    reference = {"Regimen": "by hand", "Regimen, wrapped": "Regimen"}.get(name)
    ratio = _ratio(speeds, processes, "wall", name, reference) if reference else None
    to = f"{reference}, {processes}" if reference else ""
    return Row(label, statistics.median(own), min(own), max(own), ratio, to)


def _ratio(
    speeds: Speeds, processes: int, clock: str, name: str = "Regimen", reference: str = "by hand"
) -> float:
    """Return the median over the turns of one contender's speed by another's."""
    pairs = zip(speeds[name, processes], speeds[reference, processes], strict=True)
    ratios: list[float] = [getattr(own, clock) / getattr(other, clock) for own, other in pairs]
    return statistics.median(ratios)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
