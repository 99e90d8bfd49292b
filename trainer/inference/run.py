"""A finished run: its configuration, metrics, model and predictions; evaluate its checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from regimen.conf.addresses import wrong_addresses
from regimen.conf.check import parse, parse_sound
from regimen.conf.errors import ConfigError, raise_problems
from regimen.conf.interpolation import followers, leaves
from regimen.conf.schema import Config
from regimen.conf.schema_trainer import STRATEGIES
from regimen.conf.yaml_file import plain_values
from regimen.data import tokenizers
from regimen.data.decode import pil_to_channels, read_image
from regimen.data.errors import DataError
from regimen.data.formats.coco import Picture
from regimen.data.formats.detection_folder import DetectionFolder, collate_boxes
from regimen.data.formats.new_texts import given_texts
from regimen.data.image_folder import Pictures
from regimen.data.loading.fetch import Collate, collate
from regimen.data.loading.loader import Loader
from regimen.data.text import Prompts
from regimen.models.pretrained import no_initial_weights
from regimen.trainer import snapshot
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import (
    build_pipeline,
    key_of,
    nodes_with_statistics,
    with_statistics,
)
from regimen.trainer.assembly.experiment import build_evaluator, build_split
from regimen.trainer.assembly.parts import build_strategy, with_classes
from regimen.trainer.checkpoints import borrowed
from regimen.trainer.checkpoints.archive import DamagedCheckpointError, digest
from regimen.trainer.checkpoints.reader import best_or_last, check_payload, read_checkpoint
from regimen.trainer.components.components import Components
from regimen.trainer.errors import CheckpointError
from regimen.trainer.evaluation import evaluate, evaluation_weights
from regimen.trainer.inference.instance import load_instance, task_of
from regimen.trainer.inference.predictor import (
    Generation,
    InferenceMetadata,
    Predictor,
    Row,
    Rows,
    Sampling,
    class_count_of,
    classes_of,
    read_inference_metadata,
    with_attributes_of,
)
from regimen.trainer.inference.rows import records_of, table_of
from regimen.trainer.runs.directory import refuse_links, versions
from regimen.trainer.runs.status import RunDirectoryError, read_metrics
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.allow_list import allow, close
from regimen.trainer.task import Task

logger = logging.getLogger("regimen")


def load_run(
    path: str | Path,
    device: str = "auto",
    allow_targets: Iterable[str] = (),
    model: nn.Module | None = None,
    task: Task | None = None,
    moved: Mapping[str, str] | None = None,
    allow_remote_code: bool = False,
) -> Run:
    """Open the run in a directory; nothing but its configuration is read yet.

    device: auto (what the machine has), cpu, or any other type of device of this machine.
    allow_targets: further packages that the run's `_target_`s may name, as `--allow-target` does.
    model: a model with the layers of the run's; its weights are replaced. Needed for the run of a
    `Trainer` from Python, whose files describe no model.
    task: interprets the outputs. Needed for the run of a `Trainer` with a task class of the user's.
    moved: where weights are now that the run's checkpoints do not hold: `{"model.name": DIR}`.
    allow_remote_code: run the code that a model or tokenizer of transformers brings.
    Raises RunDirectoryError if there is no run, ConfigError if its configuration is invalid.
    """
    folder = Path(path).expanduser()
    source = folder / "config.yaml"
    if not source.is_file():
        raise RunDirectoryError(f"{folder} holds no run: it has no {source.name}")
    refuse_links(folder, "run")
    way_out = "a training with resume=auto restores it from a checkpoint"
    try:
        values = plain_values(source.read_text(encoding="utf-8"), str(source))
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"cannot read {source}: {error}; {way_out}") from error
    if not isinstance(values, dict) or not values:
        raise RunDirectoryError(f"{source} holds no configuration; {way_out}")
    allow(allow_targets)
    tokenizers.allow_remote_code(allow_remote_code)
    close([str(folder)])
    raise_problems(wrong_addresses(leaves(values)))
    for key, place in (moved or {}).items():
        _move(values, key, place)
    describes_model = "model" in values
    if not describes_model and model is None:
        raise ConfigError(
            "model",
            f"{folder} is the run of a Trainer from Python, whose files describe no model",
            f"load_run({str(path)!r}, model=net), where net has the layers of the run's model",
        )
    config = parse(values) if describes_model else parse_sound(values, ())[0]
    devices = config.strategy.get("devices", "auto")
    strategy = {"_target_": STRATEGIES["single"], "accelerator": device, "devices": devices}
    config = replace(config, strategy=strategy)
    if describes_model:
        config = checked_config(config, folder)
    return Run(folder, config, model, task)


def _move(values: Any, key: str, place: str) -> None:
    """Set a key, and the arguments of data sets that have its value, in place."""
    if key not in dict(leaves(values)):
        raise ConfigError(key, "is no key of the run", "model.name and model.weights name weights")
    for name in (key, *followers(values, key)):
        *sections, last = name.split(".")
        node = values
        for section in sections:
            node = node[section]
        node[last] = place


class Run:
    """A run on disk; its parts are loaded at their first use."""

    def __init__(
        self,
        path: Path,
        config: Config,
        model: nn.Module | None = None,
        task: Task | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self._instance = model
        self._task = task
        self._components: dict[str, Components] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def facts(self) -> InferenceMetadata:
        """The metadata of the run's data: classes, the form of inputs and outputs."""
        facts = read_inference_metadata(self.path)
        if not self.config.model:
            return facts
        # Its weights may be elsewhere by now: see `moved` of `load_run`.
        return facts._replace(model=with_classes(self.config.model, facts.num_classes))

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Everything that was logged: a dict for each line with `step`, `epoch`, `train/loss`..."""
        return list(read_metrics(self.path))

    def components(self, checkpoint: str = "best") -> Components:
        """Return what evaluates and predicts, with the model on its device."""
        if checkpoint not in self._components:
            strategy = build_strategy(self.config)
            strategy.setup()
            if self._instance is not None:
                # One model holds the weights of one checkpoint: those before are forgotten.
                self._components.clear()
                place = find_checkpoint(self.path, checkpoint)
                task = task_of(self.facts.outputs, self._task)
                made = load_instance(place, self.config, strategy, self._instance, task)
            else:
                made = load_components(
                    self.path, self.config, self.facts.num_classes, strategy, checkpoint
                )
            self._components[checkpoint] = made
        return self._components[checkpoint]

    def model(self, checkpoint: str = "best") -> nn.Module:
        """Return the network in evaluation mode, with the weights that the run was evaluated with.

        checkpoint: best, last or a path. Raises CheckpointError.
        """
        components = self.components(checkpoint)
        with evaluation_weights(components):  # an average's, if the run used one
            state = {name: v.clone() for name, v in components.model.state_dict().items()}
        components.model.load_state_dict(state)
        return components.model.eval()

    def predict(
        self,
        images: Any,
        *,
        top_k: int = 1,
        batch_size: int | None = None,
        checkpoint: str = "best",
    ) -> list[Row]:
        """Return a row for each picture, as `predict` writes them: prediction, probability...

        images: file names, PIL pictures, uint8 tensors or arrays [C, H, W] (arrays [H, W] and
        [H, W, C] too). For a run on texts: texts, or dicts by column. For a run on a table: rows,
        as a DataFrame, dicts by column or one such dict, in the words and units of the file. For a
        table and any other run: a tensor or an array [n, ...] of inputs after the transforms.
        batch_size: default `loader.eval_batch_size`, or `loader.batch_size`.
        Raises DataError for anything else.
        """
        if self.facts.inputs["kind"] in ("texts", "words"):
            texts = given_texts(self.facts.inputs, _as_list(images))
            predictor = Predictor(self.components(checkpoint))
            rows = Rows(self.facts, top_k, samples=texts)
            given = map(texts.__getitem__, range(len(texts)))
            return self._rows(predictor, given, rows, batch_size, texts.collate_batch)
        samples = self._samples(images)
        predictor = Predictor(self.components(checkpoint))
        into_batch = collate_boxes if "fitted" in self.facts.inputs else collate
        return self._rows(predictor, samples, Rows(self.facts, top_k), batch_size, into_batch)

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
        predictor = Predictor(self.components(checkpoint), generation=generation)
        samples = map(dataset.__getitem__, range(len(texts)))
        rows = self._rows(predictor, samples, Rows(self.facts, prompts=texts), batch_size)
        return [row["prediction"] for row in rows]

    def loader(self, split: str = "val") -> Iterator[Any]:
        """Yield the batches of the run's own val (or val/NAME) or test data, on its device."""
        config = as_trained(self.config, best_or_last(self.path / "checkpoints"))
        loader, _ = build_split(config, build_strategy(config), split, self.facts.classes)
        return (micro.batch for micro in loader.epoch(0))

    def _rows(
        self,
        predictor: Predictor,
        samples: Iterator[Any],
        rows: Rows,
        batch_size: int | None,
        into_batch: Collate = collate,
    ) -> list[Row]:
        """Return the row of each sample, computed batch by batch."""
        size = batch_size or self.config.loader.eval_batch_size or self.config.loader.batch_size
        table: list[Row] = []
        with torch.inference_mode(), predictor.ready():
            while batch := list(islice(samples, size)):
                numbers = range(len(table), len(table) + len(batch))
                inputs = predictor.components.to_device(into_batch(batch))
                table += rows(predictor.ask(inputs, numbers))
        return table

    def _samples(self, given: Any) -> Iterator[Any]:
        """Return what `predict` was given, as samples of the run's data."""
        form = self.facts.inputs
        if form["kind"] == "picture":
            return self._pictures(given)
        records = records_of(given)
        if form["kind"] == "table" and records is not None:
            if not records:
                return iter(())
            transform = build_pipeline(self.config, "eval")
            table = table_of(records, form["features"], form["missing"], transform)
            return (table[number] for number in range(len(table)))
        if hasattr(given, "to_numpy"):  # a DataFrame of inputs
            given = given.to_numpy()
        if isinstance(given, np.ndarray):
            given = torch.from_numpy(given)
            # numpy's default is float64, which a model in any other precision does not take.
            if given.is_floating_point() and self.config.trainer.precision != "fp64":
                given = given.float()
        return iter(given)

    def _pictures(self, images: Any) -> Iterator[Any]:
        """Yield pictures, given in any usual form, as the samples of the run's data."""
        form = pictures_for(self.facts, self.config, [])
        channels = form.channels
        if isinstance(images, (str, os.PathLike)):
            images = [images]
        for image in images:
            if isinstance(image, (str, os.PathLike)):
                tensor = read_image(Path(image), channels, form.value_range)
            elif isinstance(image, Image.Image):
                tensor = pil_to_channels(image, "a picture", channels, form.value_range)
            elif isinstance(image, Tensor):
                tensor = image
            else:
                tensor = torch.from_numpy(np.array(image))
            if tensor.ndim == 2:
                tensor = tensor[None]
            elif tensor.ndim == 3 and tensor.shape[0] != channels == tensor.shape[2]:
                tensor = tensor.permute(2, 0, 1)  # [H, W, C]
            if tensor.dtype != torch.uint8 or tensor.ndim != 3 or tensor.shape[0] != channels:
                raise DataError(
                    f"a picture of type {tensor.dtype} and shape {list(tensor.shape)}: the run "
                    f"takes uint8 [{channels}, height, width]"
                )
            yield form.resize_and_transform(tensor)


def _as_list(given: Any) -> list[Any]:
    """Return texts as a list: a single one, a table of them, or any sequence."""
    if isinstance(given, str):
        return [given]
    records = records_of(given)
    return list(given) if records is None else list(records)


def pictures_for(facts: InferenceMetadata, config: Config, paths: Sequence[str]) -> Pictures:
    """Return picture files in the form that a run's transforms expect. Raises ConfigError."""
    inputs = facts.inputs
    if inputs["kind"] != "picture":
        raise ConfigError(
            "source",
            "the run was not trained on pictures, as far as its data set shows: one that takes "
            "`transform` and gives it uint8 pictures (Pillow, tensor or array) can be asked about "
            "files",
            "source=val or source=test; or describe a data set in data.predict",
        )
    pipeline = build_pipeline(config, "eval")
    if "fitted" in inputs:
        unlabelled = [Picture(path) for path in paths]
        classes = facts.classes or ()
        return DetectionFolder(
            unlabelled,
            classes,
            inputs["fitted"],
            inputs["channels"],
            pipeline,
            for_training=False,
            value_range=inputs.get("range"),
        )
    return Pictures(
        paths, inputs["channels"], inputs["size"], pipeline, value_range=inputs.get("range")
    )


def prompts_for(
    facts: InferenceMetadata, config: Config, names: Sequence[str], texts: Sequence[str]
) -> Prompts:
    """Return prompts as the samples of a run that continues text. Raises ConfigError."""
    inputs = facts.inputs
    if inputs["kind"] != "text" or facts.outputs["kind"] != "text" or not facts.classes:
        raise ConfigError(
            "run",
            "its task and data do not continue text",
            "task=language_model does on data=docstrings and on the .txt files of data=tokens; "
            "token files of numbers do not hold the tokenizer that made them",
        )
    transform = build_pipeline(config, "eval")
    return Prompts(names, texts, facts.classes, inputs["context"], transform, inputs["encoding"])


def checked_config(config: Config, run_dir: Path, checkpoint: str = "best") -> Config:
    """Return a finished run's configuration with the attributes of its training set.

    Raises ConfigError, as `check_targets` does; CheckpointError where what the checkpoint borrows
    is gone.
    """
    config = with_attributes_of(run_dir, config)
    try:
        check_targets(config)
    except ConfigError as error:
        payload = None
        with suppress(CheckpointError):
            payload = read_checkpoint(find_checkpoint(run_dir, checkpoint))
        with borrowed.explaining_missing(payload, config.model, f"{run_dir}: "):
            raise error
    return config


def load_components(
    run_dir: Path, config: Config, num_classes: int | None, strategy: Strategy, checkpoint: str
) -> Components:
    """Build a run's model with the weights of a checkpoint (best, last or a path).

    Raises CheckpointError, and what building a model raises.
    """
    path = find_checkpoint(run_dir, checkpoint)
    try:
        payload = read_checkpoint(path)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error}; checkpoint=NAME takes another of {_names(path.parent)}"
        ) from error
    check_payload(payload, path)
    # The checkpoint brings its own weights, but for those that it borrows.
    with (
        nullcontext() if borrowed.KEY in payload else no_initial_weights(),
        borrowed.explaining_missing(payload, config.model, f"{path}: "),
    ):
        components = build_evaluator(config, num_classes, strategy, classes=classes_of(run_dir))
    snapshot.load_weights(components, payload, path)
    components.state.global_step = snapshot.log_point_of(payload).step
    return components


def whole(path: Path, payload: dict[str, Any], moved: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a run's checkpoint with the weights that it borrows.

    `moved`: as in `load_run`. Raises CheckpointError for a file that is not in a run.
    """
    run_dir = path.absolute().parent.parent
    if not (run_dir / "config.yaml").is_file():
        raise CheckpointError(
            f"{path}: what it borrows is read by building the model, and {run_dir} is no run that "
            "describes it: convert it in the folder of its run"
        )
    model = load_run(run_dir, "cpu", moved=moved).components(str(path)).model
    lent = {name: model.state_dict()[name] for name in borrowed.left_out(payload)}
    return borrowed.with_weights(payload, lent)


def origin_of(run_dir: Path, components: Components, checkpoint: str) -> dict[str, Any]:
    """Return where the weights of a model come from, as plain values."""
    path = find_checkpoint(run_dir, checkpoint)
    return {
        "run": str(run_dir.absolute()),
        "checkpoint": str(path),
        "sha256": digest(path),
        "step": components.state.global_step,
        "average": None if components.average is None else components.average.name,
        "versions": versions(),
    }


def as_trained(config: Config, checkpoint: Path | None) -> Config:
    """Return a configuration whose tables are encoded as those that a checkpoint was trained on."""
    if checkpoint is None or not nodes_with_statistics(config):
        return config
    return with_statistics(config, read_checkpoint(checkpoint))


def find_checkpoint(run_dir: Path, name: str) -> Path:
    """Return a checkpoint's path: `best` (or else the last), `last`, or a path."""
    folder = run_dir / "checkpoints"
    path = best_or_last(folder) if name == "best" else folder / f"{name}.pt"
    if path is None or not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint={name}: {folder} holds no such checkpoint; there are {_names(folder)}"
        )
    return path


def _names(folder: Path) -> str:
    """Return the names that `checkpoint=` can have for the files of a folder."""
    names = sorted(path.stem for path in folder.glob("*.pt"))
    return ", ".join(names[:20]) or "none"


def open_splits(
    config: Config, strategy: Strategy, split: str | None, classes: Sequence[str] | None
) -> dict[str, tuple[Loader, int | None]]:
    """Open `split`; by default all test sets, or without any the first of validation.

    classes: the run's class names by number; None if it has no names.
    Returns by split what `build_split` does. Raises ConfigError for a split that the data do not
    have.
    """
    tests = list(config.data.tests)
    if split is None and tests:
        try:
            return {test: build_split(config, strategy, test, classes) for test in tests}
        except ConfigError as error:
            # Only the test sets cannot be opened: those of validation take their place.
            lacks_tests = {problem.key for problem in error.problems} <= set(map(key_of, tests))
            if config.data.val is None or not lacks_tests:
                raise
    if split is None:
        split = next(iter(config.data.validations), "test")
        if split != "test":
            logger.info("the data have no test split: split=%s", split)
    splits = tests if split == "test" and tests else [split]
    return {one: build_split(config, strategy, one, classes) for one in splits}


def evaluate_run(
    config: Config,
    run_dir: Path,
    checkpoint: str,
    split: str | None,
    strategy: Strategy | None = None,
) -> tuple[str, dict[str, float]]:
    """Return the split (see `open_splits`), and the metrics of `checkpoint` over it.

    `strategy` (default: the configuration's, in this process) must be set up; with several
    processes this is a collective, and all return the same. Raises CheckpointError, and ConfigError
    for a split that the data do not have.
    """
    path = find_checkpoint(run_dir, checkpoint)
    if strategy is None:
        strategy = build_strategy(config)
        strategy.setup()
    config = as_trained(config, path)
    opened = open_splits(config, strategy, split, classes_of(run_dir))
    _, num_classes = next(iter(opened.values()))
    trained = class_count_of(run_dir, num_classes)
    components = load_components(run_dir, config, trained, strategy, str(path))
    if components.average is not None:
        logger.info("evaluating the average of callbacks.%s", components.average.name)
    return measured(components, opened)


def measured(
    components: Components, opened: Mapping[str, tuple[Loader, int | None]]
) -> tuple[str, dict[str, float]]:
    """Return the split, `test` of several, and the metrics over what `open_splits` opened."""
    metrics = dict[str, float]()
    for split, (loader, _) in opened.items():
        try:
            metrics |= evaluate(components, loader, split, step=components.state.global_step)
        finally:
            loader.close()
    return next(iter(opened)) if len(opened) == 1 else "test", metrics
