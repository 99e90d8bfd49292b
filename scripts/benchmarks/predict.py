"""What `predict` costs: its table, against a bare `inference_mode` loop over the same loader.

The experiment `resnet18` answers for picture files. Both contenders read and transform them with
the same loader, in the main process, with one thread; the bare loop keeps the network's outputs and
makes nothing of them. Ours also interprets them, makes a row of each and writes the table. Rates
are by the CPU's time, which other processes change least; each ratio is within one turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from conf.check import parse
from data.loading.on_device import OnDevice
from scripts.benchmarks.report import Report, Row, one_thread
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from scripts.prediction.table import GrowingTable
from trainer.build.data import build_data, eval_loader
from trainer.build.experiment import build_evaluator
from trainer.build.strategy import build_strategy
from trainer.inference.facts import InferenceFacts, facts_of
from trainer.inference.predictor import Predictor
from trainer.inference.rows import Rows
from trainer.inference.run import pictures_for
from trainer.trainer import Trainer

SAMPLES = 128
SIDE = 8  # of a file, as the digits; they are brought to the 16 pixels of the run
OVERRIDES = (
    "experiment=resnet18",
    "strategy.accelerator=cpu",
    "loader.num_workers=0",
)


def measure(rounds: int) -> Report:
    """Let both answer for all files `rounds` times, in turn, and compare."""
    with tempfile.TemporaryDirectory() as scratch, one_thread():
        trainer, loader, facts = _parts(Path(scratch))
        contenders: dict[str, Callable[[], None]] = {
            "bare loop": lambda: _bare(trainer, loader),
            "Regimen": lambda: _predict(trainer, loader, facts, Path(scratch)),
        }
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):  # the first is not counted: it fills the file cache
            for name, answer in contenders.items():
                since = time.process_time()
                answer()
                if turn:
                    rates[name].append(SAMPLES / (time.process_time() - since))
    own, bare = rates["Regimen"], rates["bare loop"]
    ratio = statistics.median(a / b for a, b in zip(own, bare, strict=True))
    return Report(
        name="predict",
        title="Answers for picture files as a table, one thread",
        unit="samples/s",
        rows=[
            Row("bare loop", statistics.median(bare), min(bare), max(bare)),
            Row("Regimen", statistics.median(own), min(own), max(own), ratio, "bare loop"),
        ],
        headlines={"ratio_to_reference": ratio},
        settings={"rounds": rounds, "samples": SAMPLES, "overrides": list(OVERRIDES)},
    )


def _parts(folder: Path) -> tuple[Trainer, OnDevice, InferenceFacts]:
    config = parse(compose(parse_arguments(OVERRIDES)).config)
    strategy = build_strategy(config)
    strategy.setup()
    data = build_data(config, ("val",))
    trainer = build_evaluator(config, data.num_classes, strategy)
    facts = facts_of(config, data, trainer.task)
    dataset = pictures_for(facts, config, _files(folder))
    return trainer, eval_loader(config, dataset, strategy), facts


def _files(folder: Path) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    paths = [str(folder / f"{number:04d}.png") for number in range(SAMPLES)]
    for picture, path in zip(pixels, paths, strict=True):
        Image.fromarray(picture.numpy()).save(path)
    return paths


@torch.inference_mode()
def _bare(trainer: Trainer, loader: OnDevice) -> None:
    model = trainer.model.eval()
    outputs = [model(trainer.to_device(micro.batch)) for micro in loader.epoch(0)]
    assert sum(map(len, outputs)) == SAMPLES


def _predict(trainer: Trainer, loader: OnDevice, facts: InferenceFacts, folder: Path) -> None:
    path = folder / "predictions.csv"
    rows = Rows(facts, 1, loader.dataset.path)
    table = GrowingTable(path, {}, loader.sampler.batch_size, resume=False)
    for answers in Predictor(trainer)(loader):
        table.write(rows(answers))
    table.finish()
    assert table.rows == SAMPLES
