"""What `predict` costs: its table, against a bare `inference_mode` loop over the same loader.

The experiment `resnet18` answers for picture files. Both contenders read and transform them with
the same loader, in the main process, with one thread; the bare loop keeps the network's outputs and
makes nothing of them. Ours also interprets them, makes a row of each and writes the table. Rates
are by the CPU's time, which other processes change least.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from benchmarks import report
from benchmarks.report import BARE, OURS, Report
from conf.check import parse
from data.loading.loader import Loader
from scripts.cli.arguments import parse_arguments
from scripts.cli.keys import Prediction
from scripts.composition.compose import compose
from scripts.runs.answers import Findings
from trainer.assembly.data import build_data
from trainer.assembly.experiment import build_evaluator, eval_loader
from trainer.assembly.parts import build_strategy
from trainer.inference.predictor import InferenceFacts, Predictor, facts_of
from trainer.inference.run import pictures_for
from trainer.trainer import Trainer

SAMPLES = 128
SIDE = 8  # of a file, as the digits; they are brought to the 16 pixels of the run
OVERRIDES = ("experiment=resnet18", "strategy.accelerator=cpu", "loader.num_workers=0")


@torch.inference_mode()
def bare(trainer: Trainer, loader: Loader) -> None:
    """Answer by hand."""
    model = trainer.model.eval()
    outputs = [model(trainer.to_device(micro.batch)) for micro in loader.epoch(0)]
    assert sum(map(len, outputs)) == SAMPLES


def ours(trainer: Trainer, loader: Loader, facts: InferenceFacts, folder: Path) -> None:
    """Answer as `predict` does."""
    options = Prediction(run="", source="", out=str(folder / "predictions.csv"))
    found = Findings(options, facts, loader.dataset)
    for answers in Predictor(trainer)(loader):
        found.add(answers)
    found.write({})
    assert len(found.rows) == SAMPLES


def measure(rounds: int) -> Report:
    """Let both answer for all files `rounds` times, in turn, and compare."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        trainer, loader, facts = _parts(Path(scratch))
        by_us = partial(ours, trainer, loader, facts, Path(scratch))
        ways = {BARE: partial(bare, trainer, loader), OURS: by_us}
        runs = {name: partial(report.rate, SAMPLES, way) for name, way in ways.items()}
        rates = report.in_turn(runs, rounds)
    return Report(
        name="predict",
        title="Answers for picture files as a table, one thread",
        unit="samples/s",
        rows=report.compared(rates, {OURS: BARE}),
        headlines={"ratio_to_reference": report.paired(rates[OURS], rates[BARE])},
        settings={"rounds": rounds, "samples": SAMPLES, "overrides": list(OVERRIDES)},
    )


def _parts(folder: Path) -> tuple[Trainer, Loader, InferenceFacts]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    paths = [str(folder / f"{number:04d}.png") for number in range(SAMPLES)]
    for picture, path in zip(pixels, paths, strict=True):
        Image.fromarray(picture.numpy()).save(path)
    config = parse(compose(parse_arguments(OVERRIDES)).config)
    strategy = build_strategy(config)
    strategy.setup()
    data = build_data(config, ("val",))
    trainer = build_evaluator(config, data.num_classes, strategy)
    facts = facts_of(config, data, trainer.task)
    return trainer, eval_loader(config, pictures_for(facts, config, paths), strategy), facts
