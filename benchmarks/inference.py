"""What answers cost beside the network: ours, and a bare `inference_mode` loop.

Both sides read the same loader, with one thread. An evaluation gives loss and accuracy of images of
CIFAR's size, bytes in memory that are standardized. `predict` answers for picture files: the bare
loop keeps the network's outputs, ours interprets them, makes a row of each and writes the table.
Rates are by the CPU's time, which other processes change least.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks import report
from benchmarks.data import ours_in_memory
from benchmarks.report import BARE, OURS, Report
from conf.check import parse
from data.loading.loader import Loader
from models.resnet import ResNet
from models.small_cnn import SmallCNN
from scripts.cli.keys import Prediction
from scripts.composition.compose import compose
from scripts.runs.answers import Findings
from trainer.assembly.data import build_data
from trainer.assembly.experiment import build_evaluator, eval_loader
from trainer.assembly.parts import build_strategy
from trainer.inference.predictor import InferenceFacts, Predictor, facts_of
from trainer.inference.run import pictures_for
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

BATCH = 128
EVALUATIONS = 12  # rounds of ten seconds or more each
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and batches of a pass
    "small_cnn": (partial(SmallCNN, num_classes=10, in_channels=3), 10),
    "resnet18": (partial(ResNet, depth=18, num_classes=10, in_channels=3, stem="cifar"), 2),
}
SAMPLES = 128  # picture files
SIDE = 8  # of a file, as the digits; they are brought to the 16 pixels of the run
OVERRIDES = ("experiment=resnet18", "strategy.accelerator=cpu", "loader.num_workers=0")


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
    images = torch.randint(256, (batches * BATCH, 3, 32, 32), dtype=torch.uint8)
    words = ("transforms=basic", f"loader.batch_size={BATCH}")
    loader = ours_in_memory(images, *words, targets=torch.arange(len(images)) % 10)
    optimizer = SGD(model.parameters(), lr=0.1)
    return Trainer(model, Classification(num_classes=10), optimizer, loader), loader


def evaluate(rounds: int) -> Report:
    """Evaluate `rounds` times, at most 12, in each way, in turn, with each network, and compare."""
    rounds = min(rounds, EVALUATIONS)
    rates: dict[str, list[float]] = {}
    torch.set_num_threads(1)
    for network, (make, batches) in NETWORKS.items():
        trainer, loader = evaluated(make(), batches)
        ways: dict[str, Callable[[], object]] = {
            f"{BARE}, {network}": partial(evaluate_by_hand, trainer, loader),
            f"{OURS}, {network}": partial(trainer.evaluate, loader, "val"),
        }
        rates |= _rates(ways, batches * BATCH, rounds)
    references = {f"{OURS}, {name}": f"{BARE}, {name}" for name in NETWORKS}
    ratios = report.ratios(rates, references)
    return Report(
        "evaluate",
        f"Evaluating images of 32 x 32 in batches of {BATCH}, one thread",
        "images/s",
        rates,
        references,
        {"ratio_to_reference": ratios[f"{OURS}, resnet18"]}
        | {f"ratio_to_reference_{network}": ratios[f"{OURS}, {network}"] for network in NETWORKS},
        {"rounds": rounds, "batches": {k: n for k, (_, n) in NETWORKS.items()}},
    )


def _rates(
    ways: dict[str, Callable[[], object]], samples: int, rounds: int
) -> dict[str, list[float]]:
    runs = {name: partial(report.rate, samples, way) for name, way in ways.items()}
    return report.in_turn(runs, rounds)


@torch.inference_mode()
def _predict_by_hand(trainer: Trainer, loader: Loader) -> None:
    model = trainer.model.eval()
    outputs = [model(trainer.to_device(micro.batch)) for micro in loader.epoch(0)]
    assert sum(map(len, outputs)) == SAMPLES


def _predict(trainer: Trainer, loader: Loader, facts: InferenceFacts, folder: str) -> None:
    """Answer as the command `predict` does."""
    options = Prediction(run="", source="", out=f"{folder}/predictions.csv")
    found = Findings(options, facts, loader.dataset)
    for answers in Predictor(trainer)(loader):
        found.add(answers)
    found.write({})
    assert len(found.rows) == SAMPLES


def predict(rounds: int) -> Report:
    """Let both answer for all files `rounds` times, in turn, and compare."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{number:04d}.png")) for number in range(SAMPLES)]
        for picture, path in zip(pixels, paths, strict=True):
            Image.fromarray(picture.numpy()).save(path)
        config = parse(compose(OVERRIDES).config)
        strategy = build_strategy(config)
        strategy.setup()
        data = build_data(config, ("val",))
        trainer = build_evaluator(config, data.num_classes, strategy)
        facts = facts_of(config, data, trainer.task)
        loader = eval_loader(config, pictures_for(facts, config, paths), strategy)
        ways: dict[str, Callable[[], object]] = {
            BARE: partial(_predict_by_hand, trainer, loader),
            OURS: partial(_predict, trainer, loader, facts, folder),
        }
        rates = _rates(ways, SAMPLES, rounds)
    return Report(
        "predict",
        "Answers for picture files as a table, one thread",
        "samples/s",
        rates,
        {OURS: BARE},
        {"ratio_to_reference": report.paired(rates[OURS], rates[BARE])},
        {"rounds": rounds, "samples": SAMPLES, "overrides": list(OVERRIDES)},
    )
