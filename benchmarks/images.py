"""What images cost beside the network: in training, in an evaluation and as answers in a table.

All with one thread and by the CPU's time, which other processes change least.

train: ResNet-18 on images of CIFAR's size. Ours are bytes in memory that are cropped, flipped and
standardized, with bar, TensorBoard, metrics and a log line every three updates. The bare loop
indexes images that are ready, and does nothing else. Each has a process of its own: with two models
in one heap it is luck which of them pays for the memory that the C library gives back to the
system. Between processes it is luck as well, so there are several pairs of them. In ours the C
library keeps freed memory, as it does in our commands. They train in turn, three updates each. A
checkpoint is saved at the end: its CPU time, the writing beside the training included, is added as
that of one save for 45,000 images, an epoch of CIFAR-10. Four minutes.

evaluate, predict: both sides read the same loader, the bare one in an `inference_mode` loop. An
evaluation gives loss and accuracy of images of CIFAR's size, bytes in memory that are standardized.
`predict` answers for picture files: the bare loop keeps the network's outputs, ours interprets
them, makes a row of each and writes the table.
"""

import contextlib
import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks import ours, report
from benchmarks.by_hand import updates
from benchmarks.data import made_up, ours_in_memory
from benchmarks.report import BARE, OURS, Report
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.lr_monitor import LRMonitor
from regimen.callbacks.progress import Progress
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.conf.check import parse
from regimen.data.loading.loader import Loader
from regimen.models.resnet import ResNet
from regimen.models.small_cnn import SmallCNN
from regimen.scripts.cli.keys import Prediction
from regimen.scripts.composition.compose import compose
from regimen.scripts.runs.answers import PredictionWriter
from regimen.trainer.assembly.data import build_data
from regimen.trainer.assembly.experiment import build_evaluator
from regimen.trainer.assembly.loaders import eval_loader
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.components.components import Components
from regimen.trainer.inference.predictor import InferenceMetadata, Predictor, inference_metadata
from regimen.trainer.inference.run import pictures_for
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer

BATCH, TURN = 32, 3  # images of an update; updates of one contender, then as many of the other
PAIRS = 3  # of processes for each form
START: Final = "spawn"  # a fork would copy this process's heap
EPOCH = 45_000  # images from one save to the next
FORMS = ("fp32", "fp32, channels_last", "bf16", "bf16, channels_last")
EVALUATED = 128  # images of a batch
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and batches of a pass
    "small_cnn": (partial(SmallCNN, num_classes=10, in_channels=3), 10),
    "resnet18": (partial(ResNet, depth=18, num_classes=10, in_channels=3, stem="cifar"), 2),
}
SAMPLES, SIDE = 128, 8  # picture files, as the digits: brought to the 16 pixels of the run
OVERRIDES = ("experiment=resnet18", "strategy.accelerator=cpu", "loader.num_workers=0")


def train(rounds: int) -> Report:
    """Train in each form for `rounds` turns in each pair of processes, and compare."""
    rates: dict[str, list[float]] = {}
    saves = []
    for form in FORMS:
        pairs = [_pair(form, rounds) for _ in range(PAIRS)]
        saves.append(max(save for _, save in pairs))
        share = saves[-1] * TURN * BATCH / EPOCH
        turns = [turn for turns, _ in pairs for turn in turns]
        rates[f"{BARE}, {form}"] = [TURN * BATCH / bare for bare, _ in turns]
        rates[f"{OURS}, {form}"] = [TURN * BATCH / (own + share) for _, own in turns]
    ratios = list(report.ratios(rates).values())
    return Report(
        "ResNet-18 on images of 32 x 32, one thread",
        "images/s",
        rates,
        {"ratio_to_reference": ratios[0], "least_ratio": min(ratios)},
        settings={"pairs_of_processes": PAIRS, "seconds_of_a_save": max(saves)},
    )


def _pair(form: str, rounds: int) -> tuple[list[tuple[float, float]], float]:
    """Return the CPU seconds of each turn of both, and of our save at the end."""
    context, pipes, processes = multiprocessing.get_context(START), [], []
    for contender in (train_bare, train_ours):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=contender, args=(form, rounds, there), daemon=True))
        processes[-1].start()
        there.close()  # so that `recv` raises EOFError when the process fails

    def turn(contender: Connection) -> Any:
        contender.send(None)  # asks for it
        return contender.recv()

    turns = [(turn(pipes[0]), turn(pipes[1])) for _ in range(1 + rounds)][1:]
    save = turn(pipes[1])
    for process in processes:
        process.join()
    return turns, save


def _parts(form: str, rounds: int) -> tuple[nn.Module, SGD, Tensor, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layout = torch.channels_last if "channels" in form else torch.contiguous_format
    model = NETWORKS["resnet18"][0]().to(memory_format=layout)
    count = (1 + rounds) * TURN * BATCH
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return model, optimizer, images, torch.arange(count) % 10


def train_bare(form: str, rounds: int, asked: Connection) -> None:
    """Train by hand."""
    model, optimizer, images, labels = _parts(form, rounds)
    ready = images.float().div_(255).sub_(0.5).div_(0.25)
    if "channels" in form:
        ready = ready.contiguous(memory_format=torch.channels_last)
    order = torch.split(torch.randperm(len(ready)), BATCH)
    batches = ((ready[rows], labels[rows]) for rows in order)
    done = updates(model, optimizer, batches, bf16_on="cpu" if "bf16" in form else None)
    for _ in range(1 + rounds):
        asked.recv()
        began = time.process_time()
        for _ in range(TURN):
            next(done)
        asked.send(time.process_time() - began)


def train_ours(form: str, rounds: int, asked: Connection) -> None:
    """Train by a Trainer; after the turns tell the CPU seconds of the save at the end."""
    model, optimizer, images, labels = _parts(form, rounds)
    words = ("transforms=crop_flip", f"loader.batch_size={BATCH}")
    loader, began = ours_in_memory(images, *words, targets=labels), 0.0

    def turn(trainer: Trainer) -> None:
        """Send a turn's CPU seconds at its end, and wait to be asked for the next."""
        nonlocal began
        if trainer.state.updates % TURN == 0:
            asked.send(time.process_time() - began)
            asked.recv()
            began = time.process_time()

    options = {"max_steps": len(images) // BATCH, "log_every_n_steps": TURN}
    options["channels_last"] = "channels" in form
    on: list[Any] = [Progress(bar=True), TensorBoard(), LRMonitor(), MetricsLog()]
    on += [ours.AfterUpdate(turn), Checkpoint(every_n_epochs=None, monitor=None)]
    callbacks = {type(callback).__name__: callback for callback in on}
    asked.recv()
    with contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        others = {"callbacks": callbacks, "run_dir": folder, "precision": form.partition(",")[0]}
        ours.train(model, optimizer, loader, options, **others)
        asked.send(time.process_time() - began)
        loader.close()


@torch.inference_mode()
def evaluate_by_hand(trainer: Trainer, loader: Loader) -> dict[str, float]:
    """Do what `Trainer.evaluate` does."""
    trainer.model.eval()
    losses, hits, seen = 0.0, 0, 0
    for micro_batch in loader.epoch(0):
        inputs, labels = micro_batch.batch
        logits: Tensor = trainer.model(inputs)
        losses += cross_entropy(logits, labels, reduction="sum").item()
        hits += int((logits.argmax(1) == labels).sum().item())
        seen += len(labels)
    return {"val/loss": losses / seen, "val/accuracy": hits / seen}


def evaluated(model: nn.Module, batches: int) -> tuple[Trainer, Loader]:
    """Return what both evaluate."""
    images = torch.randint(256, (batches * EVALUATED, 3, 32, 32), dtype=torch.uint8)
    words = ("transforms=basic", f"loader.batch_size={EVALUATED}")
    loader = ours_in_memory(images, *words, targets=torch.arange(len(images)) % 10)
    return Trainer(model, Classification(10), SGD(model.parameters(), lr=0.1), loader), loader


def evaluate(rounds: int) -> Report:
    """Evaluate `rounds` times in each way, in turn, with each network, and compare."""
    rates: dict[str, list[float]] = {}
    torch.set_num_threads(1)
    for network, (make, batches) in NETWORKS.items():
        trainer, loader = evaluated(make(), batches)
        rate = partial(report.rate, batches * EVALUATED)
        ways = {
            f"{BARE}, {network}": partial(rate, evaluate_by_hand, trainer, loader),
            f"{OURS}, {network}": partial(rate, trainer.evaluate, loader, "val"),
        }
        rates |= report.in_turn(ways, rounds)
    ratios = {name.partition(", ")[2]: ratio for name, ratio in report.ratios(rates).items()}
    return Report(
        f"Evaluating images of 32 x 32 in batches of {EVALUATED}, one thread",
        "images/s",
        rates,
        {"ratio_to_reference": ratios["resnet18"]}
        | {f"ratio_to_reference_{network}": ratio for network, ratio in ratios.items()},
    )


@torch.inference_mode()
def _predict_by_hand(components: Components, loader: Loader) -> None:
    model = components.model.eval()
    outputs = [model(components.to_device(micro.batch)) for micro in loader.epoch(0)]
    assert sum(map(len, outputs)) == SAMPLES


def _predict(components: Components, loader: Loader, facts: InferenceMetadata, folder: str) -> None:
    """Answer as the command `predict` does."""
    options = Prediction(run="", source="", out=f"{folder}/predictions.csv")
    found = PredictionWriter(options, facts, loader.dataset)
    for answers in Predictor(components)(loader):
        found.add(answers)
    found.write({})
    assert len(found.rows) == SAMPLES


def predict(rounds: int) -> Report:
    """Let both answer for all files `rounds` times, in turn, and compare."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{number:04d}.png")) for number in range(SAMPLES)]
        for picture, path in zip(made_up(SAMPLES, SIDE, 1)[:, 0], paths, strict=True):
            Image.fromarray(picture.numpy()).save(path)
        config = parse(compose(OVERRIDES).config)
        strategy = build_strategy(config)
        data = build_data(config, ("val",))
        components = build_evaluator(config, data.num_classes, strategy)
        facts = inference_metadata(config, data, components.task)
        loader = eval_loader(config, pictures_for(facts, config, paths), strategy)
        rate = partial(report.rate, SAMPLES)
        bare = partial(rate, _predict_by_hand, components, loader)
        own = partial(rate, _predict, components, loader, facts, folder)
        rates = report.in_turn({BARE: bare, OURS: own}, rounds)
    return Report(
        "Answers for picture files as a table, one thread",
        "samples/s",
        rates,
        {"ratio_to_reference": report.paired(rates[OURS], rates[BARE])},
    )
