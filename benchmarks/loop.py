"""What the loop costs: our Trainer, and the same written by hand, in one process and in several.

step: a tiny network on batches that lie in memory, so that nothing but the loop shows. Every
contender draws from the same kind of DataLoader, and the clock is in its data set: a time stamp for
each batch. A block is 50 updates, the interval of logging, so each block holds one log. The ratios
of CPU time stand beside those of wall time: they hold on a machine that others use, too.

ddp: DistributedDataParallel in processes of one thread each, by gloo on CPUs or by nccl on as many
GPUs; with fewer cores than processes they share them. All contenders run in turn within the same
processes. One process also runs with the wrapper and without, which shows what it costs.
"""

import contextlib
import gc
import io
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from benchmarks import report
from benchmarks.by_hand import updates
from benchmarks.ours import AfterUpdate, train
from benchmarks.report import BARE, BY_HAND, OURS, Cost, Report
from regimen.callbacks.lr_monitor import LRMonitor
from regimen.callbacks.progress import Progress
from regimen.callbacks.tensorboard import TensorBoard
from regimen.data.loading.loader import Loader
from regimen.data.orders import Shuffled
from regimen.data.samplers import UpdateSampler
from regimen.data.sources import ImageTensors
from regimen.models.small_cnn import SmallCNN
from regimen.trainer.device import device_count, device_types
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.strategy import Strategy

BLOCK = 50  # updates between two logs
WARMUP, BLOCKS = 2, 10  # a turn is short, so that both of a pair meet the same machine
MAX_LR, BATCH = 0.01, 32
OFF = "Regimen, all off"

SHARED, UPDATES, UNCOUNTED = 128, 60, 10  # samples of processes' updates; updates of a turn
SIZE = 16  # pixels a side
DEVICE = device_types()[0]
PROCESSES = (1,) if device_count() == 1 else (1, 2)
WRAPPED = "Regimen, wrapped"

Batch = tuple[Tensor, Tensor]
Contender = Callable[[nn.Module, SGD, DataLoader[Batch], Path], None]


class Batches(Dataset[Batch]):
    """The same batch for every update, each with a time stamp."""

    def __init__(self) -> None:
        self._batch = torch.randn(BATCH, 32), torch.randint(10, (BATCH,))
        self.stamps: list[Cost] = []

    def __len__(self) -> int:
        return (WARMUP + BLOCKS) * BLOCK

    def __getitem__(self, index: int) -> Batch:
        self.stamps.append(report.now())
        return self._batch


def bare(model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path) -> None:
    """Draw, forward, backward, step: nothing else."""
    for _ in updates(model, optimizer, loader):
        pass


def by_hand(model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path) -> None:
    """Do by hand what a person has on: bar, TensorBoard, clipping, schedule, accuracy."""
    schedule = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=len(loader) + 1)
    writer = SummaryWriter(str(folder))
    losses, correct = torch.zeros(()), torch.zeros((), dtype=torch.long)
    model.train()
    with tqdm(total=len(loader), desc="epoch 0") as bar:
        done = updates(model, optimizer, loader, clip=True)
        for step, (loss, logits, labels, _) in enumerate(done, 1):
            schedule.step()
            losses += loss.detach()
            correct += (logits.detach().argmax(1) == labels).sum()
            if step % BLOCK == 0:
                mean, accuracy = losses.item() / BLOCK, correct.item() / (BLOCK * BATCH)
                writer.add_scalar("train/loss", mean, step)
                writer.add_scalar("train/accuracy", accuracy, step)
                writer.add_scalar("lr", schedule.get_last_lr()[0], step)
                bar.set_postfix(loss=f"{mean:.3f}", accuracy=f"{accuracy:.3f}", refresh=False)
                losses.zero_()
                correct.zero_()
            bar.update(1)
    writer.close()


def ours(
    model: nn.Module, optimizer: SGD, loader: DataLoader[Batch], folder: Path, all_on: bool = True
) -> None:
    """Do the same by a Trainer, or with all of that off."""
    on = {"progress": Progress(bar=True), "tensorboard": TensorBoard(), "lr_monitor": LRMonitor()}
    used: dict[str, Any] = {"run_dir": folder, "callbacks": on if all_on else {}}
    if all_on:
        used["lr_scheduler"] = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=len(loader) + 1)
    options = {"log_every_n_steps": BLOCK, "clip_grad_norm": 1.0 if all_on else None}
    train(model, optimizer, loader, options, **used)


CONTENDERS: dict[str, Contender] = {BY_HAND: by_hand, OURS: ours, BARE: bare}
CONTENDERS[OFF] = partial(ours, all_on=False)


def step(rounds: int) -> Report:
    """Run every contender `rounds` times, in turn, and compare."""
    torch.set_num_threads(1)
    runs = {name: partial(run, contender) for name, contender in CONTENDERS.items()}
    wall, cpu = report.split(report.in_turn(runs, rounds, uncounted=0))
    return Report(
        f"Cost of an update: MLP 32-32-10, batches of {BATCH} in memory, one thread",
        "µs",
        wall,
        {
            "ratio_to_handwritten": report.paired(wall[OURS], wall[BY_HAND]),
            "cpu_ratio_to_handwritten": report.paired(cpu[OURS], cpu[BY_HAND]),
            "cpu_ratio_all_off_to_bare": report.paired(cpu[OFF], cpu[BARE]),
        },
        {OFF: BARE},
    )


def run(contender: Contender) -> Cost:
    """Let a contender train a new network; return the microseconds of an update.

    They are the median over the blocks after the warm-up.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = SGD(model.parameters(), lr=MAX_LR, momentum=0.9, weight_decay=5e-4)
    batches = Batches()
    gc.collect()
    # Where nobody looks, bars draw themselves as on any terminal.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        contender(model, optimizer, DataLoader(batches, batch_size=None), Path(folder))
    wall, cpu = report.typical(batches.stamps[WARMUP * BLOCK :: BLOCK])
    return Cost(wall / BLOCK * 1e6, cpu / BLOCK * 1e6)


def ddp(rounds: int) -> Report:
    """Run both contenders `rounds` times in turn with one and with two processes."""
    speeds: dict[str, list[Cost]] = {}
    for count in PROCESSES:
        launched = LaunchConfig(1, 1, count, run_id="ddp", rdzv_endpoint="localhost:0")
        launched.rdzv_backend, launched.start_method = "c10d", "spawn"
        found = elastic_launch(launched, _rank)(rounds)[0]
        speeds |= {f"{name}, {count}": own for name, own in found.items()}
    references = {f"{WRAPPED}, 1": f"{OURS}, 1"}
    rates, cpu_rates = report.split(speeds)
    ratios, cpu_ratios = (report.ratios(each, references) for each in (rates, cpu_rates))
    most = f"{OURS}, {max(PROCESSES)}"
    return Report(
        f"Samples a second: small_cnn, images of {SIZE} x {SIZE}, {SHARED} an update",
        "samples/s",
        rates,
        {
            "ratio_to_reference": ratios[most],
            "cpu_ratio_to_reference": cpu_ratios[most],
            "ratio_to_reference_one_process": ratios[f"{OURS}, 1"],
            "ratio_of_wrapped_to_single": ratios[f"{WRAPPED}, 1"],
        },
        references,
    )


def _rank(rounds: int) -> dict[str, list[Cost]]:
    """Be one of the processes: run the contenders in turn, and return their speeds."""
    torch.set_num_threads(1)
    wrapping = DDP(accelerator=DEVICE)
    wrapping.setup()
    alone = wrapping.group.world_size == 1
    strategy: Strategy = Strategy(wrapping.device) if alone else wrapping
    runs = {BY_HAND: partial(ddp_by_hand, strategy), OURS: partial(ddp_ours, strategy)}
    if alone:
        runs[WRAPPED] = partial(ddp_ours, wrapping)
    speeds = report.in_turn(runs, rounds, uncounted=0)
    wrapping.group.leave()
    return speeds


def _parts(strategy: Strategy) -> tuple[nn.Module, SGD, TensorDataset]:
    strategy.group.gather(None)  # all begin together
    torch.manual_seed(0)
    count = SHARED * UPDATES
    samples = torch.randn(count, 1, SIZE, SIZE), torch.randint(10, (count,))
    model = SmallCNN(num_classes=10, in_channels=1).to(strategy.device)
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9), TensorDataset(*samples)


def ddp_by_hand(strategy: Strategy) -> Cost:
    """Train as a person would: DistributedSampler, DDP, clipping, running sums."""
    model, optimizer, samples = _parts(strategy)
    wrapped, world = model, strategy.group.world_size
    sampler: DistributedSampler[Any] | None = None
    if world > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(samples, shuffle=True, seed=0)
    loader = DataLoader(samples, SHARED // world, sampler=sampler, shuffle=sampler is None)
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


def ddp_ours(strategy: Strategy) -> Cost:
    """Do the same by a Trainer."""
    model, optimizer, samples = _parts(strategy)
    rank, world = strategy.group.rank, strategy.group.world_size
    order = Shuffled(len(samples), 0)
    sampler = UpdateSampler(order, batch_size=SHARED, rank=rank, world_size=world)
    stamps: list[Cost] = []
    note = AfterUpdate(lambda _: stamps.append(report.now()))
    images, labels = samples.tensors
    data = Loader(ImageTensors(images, labels, list("0123456789")), sampler, seed=0)
    options = {"clip_grad_norm": 1.0}
    train(model, optimizer, data, options, callbacks={"stamps": note}, strategy=strategy)
    return _speed(stamps)


def _speed(stamps: Sequence[Cost]) -> Cost:
    """Return samples a second, by the median update.

    A GPU works on after the host has gone on: there it is the mean, up to the end of its work.
    """
    wall, cpu = report.typical(stamps[UNCOUNTED - 1 :])
    if DEVICE != "cpu":
        torch.accelerator.synchronize()
        first, last = stamps[UNCOUNTED - 1], report.now()
        wall, cpu = ((last[i] - first[i]) / (len(stamps) - UNCOUNTED) for i in (0, 1))
    return Cost(SHARED / wall, SHARED / cpu)
