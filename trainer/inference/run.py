"""A finished run from Python: its configuration, metrics, model and predictions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conf.check import parse
from conf.errors import ConfigError, Problem
from conf.schema import Config
from conf.yaml_file import plain_values
from data.decode import decode_image, read_image
from data.errors import DataError
from data.formats.table import TableRows, rows_to_predict
from data.loading.collate import collate
from data.pictures import Pictures
from trainer.build.assembly import Assembly, Known
from trainer.build.check import check_targets
from trainer.build.data import build_data, build_pipeline
from trainer.build.experiment import build_split
from trainer.build.strategy import build_strategy
from trainer.inference.checkpoint import as_trained, best_or_last, load_trainer
from trainer.inference.facts import InferenceFacts, facts_of, read_facts
from trainer.inference.generation import Generation, Sampling, prompts_for
from trainer.inference.predictor import Answers, Predictor
from trainer.inference.rows import Row, Rows
from trainer.runs.metrics import read_metrics
from trainer.runs.status import RunDirectoryError
from trainer.strategies.strategy import Strategy
from trainer.targets.allow_list import allow
from trainer.targets.renamed import with_present_targets
from trainer.trainer import Trainer
from trainer.update.precision import Precision

_SPLITS = ("val", "test")


def load_run(path: str | Path, device: str = "auto", allow_targets: Iterable[str] = ()) -> Run:
    """Open the run in a directory; nothing but its configuration is read yet.

    device: auto (what the machine has), cpu, cuda or mps.
    allow_targets: further packages that the run's `_target_`s may name, as `--allow-target` does.
    Raises RunDirectoryError if there is no run, ConfigError if its configuration is invalid.
    """
    folder = Path(path).expanduser()
    values = _values_in(folder / "config.yaml")
    allow(allow_targets)
    config = parse(dict(with_present_targets(values)))
    check_targets(config)
    strategy: Any = {"name": "single", "accelerator": device}
    return Run(folder, replace(config, strategy=replace(config.strategy, **strategy)))


def _values_in(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RunDirectoryError(f"{path.parent} holds no run: it has no {path.name}")
    way_out = "a training with resume=auto restores it from a checkpoint"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}; {way_out}") from error
    values = plain_values(text, str(path))
    if not isinstance(values, dict):
        raise RunDirectoryError(f"{path} holds no configuration; {way_out}")
    return values


class Run:
    """A run on disk; its parts are loaded at their first use."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.config = config
        self._trainers: dict[str, Trainer] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def facts(self) -> InferenceFacts:
        """The facts about the run's data: classes, the form of inputs and outputs."""
        return facts_of_run(self.path, self.config)

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Everything that was logged, a dict for each line: `step`, `epoch`, `train/loss`..."""
        return list(read_metrics(self.path))

    def model(self, checkpoint: str = "best") -> nn.Module:
        """Return the network in evaluation mode, with the weights that the run was evaluated with.

        checkpoint: best, last or a path. Raises CheckpointError.
        """
        return _with_evaluated_weights(self.trainer(checkpoint))

    def predict(
        self,
        images: Any,
        *,
        top_k: int = 1,
        batch_size: int | None = None,
        checkpoint: str = "best",
    ) -> list[Row]:
        """Return a row for each picture, as `predict` writes them: prediction, probability...

        images: file names, the bytes of picture files, PIL pictures, uint8 tensors or arrays
        [C, H, W] (arrays [H, W] and [H, W, C] too); or, if the run's data are not pictures, a
        tensor [n, ...] of inputs after the transforms. `batch_size`: default
        `loader.eval_batch_size`, or `loader.batch_size`.
        Raises DataError for anything else.
        """
        predictor, rows = Predictor(self.trainer(checkpoint)), Rows(self.facts, top_k, str)
        found = list(self._answers(predictor, self._samples(images), rows, batch_size))
        for row in found:
            del row["file"]
        return found

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 200,
        sampling: Sampling = "greedy",
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
        checkpoint: str = "best",
    ) -> list[str]:
        """Return the text that a language model generates after each prompt, as `predict` does.

        sampling: greedy (the likeliest token) or random, from the `top_k` likeliest. seed: default
        that of the run. Raises ConfigError for a run that does not continue text, DataError for a
        prompt with characters that are not in the run's vocabulary.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        names = [f"prompt {number}" for number in range(len(texts))]
        dataset = prompts_for(self.facts, self.config, names, texts)
        seed = self.config.seed if seed is None else seed
        generation = Generation(max_new_tokens, sampling, temperature, top_k, seed)
        predictor = Predictor(self.trainer(checkpoint), generation=generation)
        rows = Rows(self.facts, 1, str, prompt_of=texts.__getitem__)
        samples = map(dataset.__getitem__, range(len(texts)))
        found = self._answers(predictor, samples, rows, batch_size)
        return [row["prediction"] for row in found]

    def _answers(
        self, predictor: Predictor, samples: Iterator[Any], rows: Rows, batch_size: int | None
    ) -> Iterator[Row]:
        """Yield the row of each sample, computed batch by batch."""
        loader = self.config.loader
        size = batch_size or loader.eval_batch_size or loader.batch_size
        first = 0
        with torch.inference_mode(), predictor.ready():
            while some := list(islice(samples, size)):
                batch = predictor.trainer.to_device(collate(some))
                values, _ = predictor.ask(batch, len(some))
                yield from rows(Answers(range(first, first + len(some)), values, None, {}))
                first += len(some)

    def loader(self, split: str = "val") -> Iterator[Any]:
        """Yield the batches of the run's own val or test data, transformed, on its device."""
        _check_split(split)
        config = as_trained(self.config, best_or_last(self.path / "checkpoints"))
        loader, _ = build_split(config, build_strategy(config), split)
        return (micro.batch for micro in loader.epoch(0))

    def trainer(self, checkpoint: str = "best") -> Trainer:
        """Return a trainer for evaluation and prediction, with the model on its device."""
        if checkpoint not in self._trainers:
            strategy = build_strategy(self.config)
            strategy.setup()
            self._trainers[checkpoint] = load_trainer(
                self.path, self.config, self.facts.num_classes, strategy, checkpoint
            )
        return self._trainers[checkpoint]

    def _samples(self, images: Any) -> Iterator[Any]:
        if self.facts.inputs["kind"] != "picture":
            yield from images
            return
        form = self.pictures([])
        singles = [images] if isinstance(images, (str, bytes, os.PathLike)) else images
        for image in singles:
            yield form.brought_to_form(as_picture(image, form.channels))

    def pictures(self, paths: Sequence[str]) -> Pictures:
        """Return picture files as a data set for the run's network."""
        return pictures_for(self.facts, self.config, paths)


def facts_of_run(path: Path, config: Config) -> InferenceFacts:
    """Return the facts about a run's data; for a run of an older version, from the data."""
    facts = read_facts(path)
    if facts is not None:
        return facts
    splits = tuple(s for s in _SPLITS if getattr(config.data, s) is not None) or ("train",)
    config = as_trained(config, best_or_last(path / "checkpoints"))
    data = build_data(config, splits)
    on_cpu = Strategy(torch.device("cpu"))
    parts = Assembly(config, Known(data.num_classes), on_cpu, Precision("fp32", "cpu"))
    return facts_of(config, data, parts.task)


def table_for(facts: InferenceFacts, config: Config, path: str) -> TableRows:
    """Return the rows of a file, encoded as the run's table was. Raises DataError."""
    form = facts.inputs
    return rows_to_predict(path, form["features"], form["missing"], build_pipeline(config, "eval"))


def pictures_for(facts: InferenceFacts, config: Config, paths: Sequence[str]) -> Pictures:
    """Return picture files in the form that a run's transforms expect. Raises ConfigError."""
    inputs = facts.inputs
    if inputs["kind"] != "picture":
        hint = "source=val or source=test; or describe a data set in data.predict"
        raise ConfigError([Problem("source", "the run was not trained on pictures", hint=hint)])
    return Pictures(paths, inputs["channels"], inputs["size"], build_pipeline(config, "eval"))


def as_picture(image: Any, channels: int) -> Tensor:
    """Return a picture, given in any usual form, as uint8 [channels, H, W]. Raises DataError."""
    if isinstance(image, (str, os.PathLike)):
        return read_image(Path(image), channels)
    if isinstance(image, bytes):
        return decode_image(image, "the picture", channels)
    if hasattr(image, "convert"):  # Pillow's
        image = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    tensor = torch.as_tensor(np.array(image)) if not isinstance(image, Tensor) else image
    if tensor.ndim == 2:
        tensor = tensor[None]
    elif tensor.ndim == 3 and tensor.shape[0] != channels and tensor.shape[2] == channels:
        tensor = tensor.permute(2, 0, 1)
    if tensor.dtype != torch.uint8 or tensor.ndim != 3 or tensor.shape[0] != channels:
        raise DataError(
            f"a picture of type {tensor.dtype} and shape {list(tensor.shape)}: the run takes "
            f"uint8 [{channels}, height, width]"
        )
    return tensor


def _with_evaluated_weights(trainer: Trainer) -> nn.Module:
    """Return the model with the evaluated weights: an average's, if the run used one."""
    weights = trainer.evaluation_weights()
    with weights:
        state: Mapping[str, Tensor] = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(state)
    return trainer.model.eval()


def _check_split(split: str) -> None:
    if split not in _SPLITS:
        raise ValueError(f"split is {split!r}, not one of {', '.join(_SPLITS)}")
