"""Throughput of DistributedDataParallel: our Trainer, and the same written by hand.

Processes of one thread each, by gloo on CPUs or by nccl on as many GPUs; with fewer cores than
processes they share them. All contenders run in turn within the same processes. One process also
runs with the wrapper and without, which shows what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks import report
from benchmarks.by_hand import updates
from benchmarks.ours import train
from benchmarks.report import BY_HAND, OURS, Cost, Report
from data.loading.loader import Loader
from data.orders import Shuffled
from data.samplers import UpdateSampler
from data.sources import ImageTensors
from models.small_cnn import SmallCNN
from trainer.callback import Callback
from trainer.strategies.ddp import DDP, Processes
from trainer.strategies.strategy import Strategy
from trainer.trainer import Trainer

BATCH, UPDATES, WARMUP = 128, 60, 10  # samples an update; updates a turn; those not counted
SIZE = 16  # pixels a side
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSES = (1, 2) if DEVICE == "cpu" or torch.cuda.device_count() > 1 else (1,)
WRAPPED = "Regimen, wrapped"


def measure(rounds: int) -> Report:
    """Run both contenders `rounds` times in turn with one and with two processes."""
    speeds: dict[str, list[Cost]] = {}
    for count in PROCESSES:
        launched = LaunchConfig(1, 1, count, run_id="ddp", rdzv_endpoint="localhost:0")
        launched.rdzv_backend, launched.start_method = "c10d", "spawn"
        found = elastic_launch(launched, _rank)(rounds)[0]
        speeds |= {f"{name}, {count}": own for name, own in found.items()}
    references = {f"{OURS}, {count}": f"{BY_HAND}, {count}" for count in PROCESSES}
    references[f"{WRAPPED}, 1"] = f"{OURS}, 1"
    rates, cpu_rates = report.split(speeds)
    ratios, cpu_ratios = (report.ratios(each, references) for each in (rates, cpu_rates))
    most = f"{OURS}, {max(PROCESSES)}"
    return Report(
        "ddp",
        f"Samples a second: small_cnn, images of {SIZE} x {SIZE}, {BATCH} an update",
        "samples/s",
        rates,
        references,
        {
            "ratio_to_reference": ratios[most],
            "cpu_ratio_to_reference": cpu_ratios[most],
            "ratio_to_reference_one_process": ratios[f"{OURS}, 1"],
            "ratio_of_wrapped_to_single": ratios[f"{WRAPPED}, 1"],
        },
        {"rounds": rounds, "device": DEVICE, "updates": UPDATES},
    )


def _rank(rounds: int) -> dict[str, list[Cost]]:
    """Be one of the processes: run the contenders in turn, and return their speeds."""
    torch.set_num_threads(1)
    wrapping = DDP(Processes(accelerator=DEVICE))
    wrapping.setup()
    alone = wrapping.group.world_size == 1
    strategy: Strategy = Strategy(wrapping.device) if alone else wrapping
    contenders = {BY_HAND: partial(by_hand, strategy), OURS: partial(ours, strategy)}
    if alone:
        contenders[WRAPPED] = partial(ours, wrapping)

    def together(contender: Callable[[], Cost]) -> Cost:
        wrapping.group.gather(None)  # a barrier
        return contender()

    runs = {name: partial(together, contender) for name, contender in contenders.items()}
    speeds = report.in_turn(runs, rounds, uncounted=0)
    wrapping.group.leave()
    return speeds


def _parts(device: torch.device) -> tuple[nn.Module, SGD, TensorDataset]:
    torch.manual_seed(0)
    count = BATCH * UPDATES
    samples = torch.randn(count, 1, SIZE, SIZE), torch.randint(10, (count,))
    model = SmallCNN(num_classes=10, in_channels=1).to(device)
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9), TensorDataset(*samples)


def by_hand(strategy: Strategy) -> Cost:
    """Train as a person would: DistributedSampler, DDP, clipping, running sums."""
    model, optimizer, samples = _parts(strategy.device)
    wrapped, world = model, strategy.group.world_size
    sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
    if world > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(samples, shuffle=True, seed=0)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        samples, BATCH // world, sampler=sampler, shuffle=sampler is None
    )
    losses, correct = (torch.zeros((), device=strategy.device) for _ in range(2))
    stamps: list[Cost] = []
    moved = ([t.to(strategy.device, non_blocking=True) for t in batch] for batch in loader)
    for loss, logits, labels, _ in updates(wrapped, optimizer, moved, clip=True):
        losses += loss.detach()
        correct += (logits.detach().argmax(1) == labels).sum()
        stamps.append(report.now())
    if world > 1:
        dist.all_reduce(losses)
        dist.all_reduce(correct)
    return _speed(stamps)


class Stamps(Callback):
    """Note the time of every update."""

    def __init__(self) -> None:
        self.times: list[Cost] = []

    def on_update_end(self, trainer: Trainer) -> None:
        """Note it."""
        self.times.append(report.now())


def ours(strategy: Strategy) -> Cost:
    """Do the same by a Trainer."""
    model, optimizer, samples = _parts(strategy.device)
    rank, world = strategy.group.rank, strategy.group.world_size
    order = Shuffled(len(samples), 0)
    sampler = UpdateSampler(order, batch_size=BATCH, rank=rank, world_size=world)
    stamps, (images, labels) = Stamps(), samples.tensors
    data = Loader(ImageTensors(images, labels, list("0123456789")), sampler, seed=0)
    options = {"max_epochs": 1, "clip_grad_norm": 1.0}
    train(model, optimizer, data, options, callbacks={"stamps": stamps}, strategy=strategy)
    return _speed(stamps.times)


def _speed(stamps: Sequence[Cost]) -> Cost:
    """Return samples a second, by the median update.

    A GPU works on after the host has gone on: there it is the mean, up to the end of its work.
    """
    wall, cpu = report.typical(stamps[WARMUP - 1 :])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        first, last = stamps[WARMUP - 1], report.now()
        wall, cpu = ((last[i] - first[i]) / (len(stamps) - WARMUP) for i in (0, 1))
    return Cost(BATCH / wall, BATCH / cpu)
