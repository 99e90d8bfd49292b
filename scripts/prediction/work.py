"""One process's part of `predict`: the loader, the model, and what the main one writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from conf.check import parse
from conf.errors import ConfigError, Problem, raise_problems
from conf.schema import Config
from data.loading.fetch import path_of
from data.loading.on_device import OnDevice
from data.pictures import Pictures, find_pictures
from data.text import Prompts, find_prompts
from scripts.cli.console import StoppedEarlyError, exit_code
from scripts.cli.request import Request
from scripts.prediction.array_file import ArrayFile
from scripts.prediction.arrays import Drawings, MaskFiles, picture_of
from scripts.prediction.options import SPLITS, Options
from scripts.prediction.table import GrowingTable, check_format
from trainer.build.check import check_targets
from trainer.build.data import build_data, eval_loader
from trainer.build.strategy import build_strategy
from trainer.checkpoints.archive import digest
from trainer.errors import Interrupted
from trainer.inference.checkpoint import as_trained, find_checkpoint, load_trainer
from trainer.inference.facts import InferenceFacts
from trainer.inference.generation import Generation, prompts_for
from trainer.inference.predictor import Answers, Predictor
from trainer.inference.rows import Row, Rows
from trainer.inference.run import facts_of_run, pictures_for, table_for
from trainer.runs import manifest
from trainer.targets.allow_list import allow
from trainer.trainer import Trainer

logger = logging.getLogger("regimen")


def answer(request: Request) -> int:
    """Answer for every sample of the source; the main process writes."""
    assert request.prediction is not None
    options = Options(**request.prediction)
    check_format(options.table)
    allow(request.allowed)
    config = _patient(parse(request.config), options)
    check_targets(config)
    run_dir = Path(options.run)
    facts = facts_of_run(run_dir, config)
    unnamed = facts.outputs["kind"] == "array" or (
        facts.outputs["kind"] == "text" and options.source in SPLITS
    )
    if unnamed and options.save is None:
        hint = "save=logits writes its answers into a file"
        raise ConfigError([Problem("task", "says nothing of what its outputs mean", hint=hint)])
    if options.source in SPLITS:
        config = as_trained(config, find_checkpoint(run_dir, options.checkpoint))
    dataset = _dataset(options, config, facts, request.files)
    generation = _generation(options, config, dataset)
    if options.draw:
        picture_of(dataset, facts.inputs)  # refuses what cannot be drawn
    strategy = build_strategy(config)
    strategy.setup()
    try:
        with strategy.group.failing_together():
            checkpoint = find_checkpoint(run_dir, options.checkpoint)
            trainer = load_trainer(run_dir, config, facts.num_classes, strategy, str(checkpoint))
            loader = eval_loader(config, dataset, strategy)
            header = _header(options, trainer, checkpoint, facts, dataset, loader, generation)
            predictor = Predictor(trainer, options.save, generation)
            _write_all(options, predictor, trainer, loader, facts, header)
            loader.close()
    finally:
        strategy.group.leave()
    return 0


def _patient(config: Config, options: Options) -> Config:
    """Return the configuration with what `on_error` says; as many may be broken as there are."""
    on_error: Any = options.on_error  # checked by `take_options`
    data = replace(config.data, on_error=on_error, max_skipped=1 << 62)
    return replace(config, data=data)


def _dataset(options: Options, config: Config, facts: InferenceFacts, lines: list[str]) -> Any:
    if options.source not in SPLITS:
        if "text" in (facts.inputs["kind"], facts.outputs["kind"]):
            return prompts_for(facts, config, *find_prompts(options.source, lines))
        if facts.inputs["kind"] == "table":
            return table_for(facts, config, options.source)
        return pictures_for(facts, config, find_pictures(options.source, lines))
    if getattr(config.data, options.source) is None:
        hint = "data.predict names samples without labels; source=DIR reads pictures"
        raise ConfigError([Problem(f"data.{options.source}", "is null: no samples", hint=hint)])
    return build_data(config, (options.source,)).sets[options.source]


def _generation(options: Options, config: Config, dataset: Any) -> Generation | None:
    """Return how prompts are continued; None where the samples are no prompts."""
    given: dict[str, Any] = {
        key: value
        for key in ("max_new_tokens", "sampling", "temperature")
        if (value := getattr(options, key)) is not None
    }
    if not isinstance(dataset, Prompts):
        raise_problems(Problem(key, "only prompts of a language model take it") for key in given)
        return None
    problems = []
    if options.save is not None:
        hint = "source=val saves the logits of the run's own data"
        problems.append(Problem("save", "there is nothing to save of new text", hint))
    if options.draw:
        problems.append(Problem("draw", "there are no pictures to draw"))
    if options.top_k is not None and options.sampling != "random":
        hint = "add sampling=random"
        problems.append(Problem("top_k", "has no effect on the likeliest token", hint))
    raise_problems(problems)
    return Generation(**given, top_k=options.top_k, seed=config.seed)


def _header(
    options: Options,
    trainer: Trainer,
    checkpoint: Path,
    facts: InferenceFacts,
    dataset: Any,
    loader: OnDevice,
    generation: Generation | None,
) -> dict[str, Any]:
    """Return where the answers come from: what must be the same for a command that goes on."""
    average = trainer.average
    return {
        "run": str(Path(options.run).absolute()),
        "checkpoint": str(checkpoint),
        "sha256": digest(checkpoint),
        "step": trainer.state.global_step,
        "average": None if average is None else average.name,
        "source": options.source,
        "samples": len(dataset),
        "files_sha256": _digest(dataset),
        "batch_size": loader.sampler.batch_size,
        "top_k": options.top_k,
        "generation": None if generation is None else asdict(generation),
        "save": options.save,
        "on_error": options.on_error,
        "classes": facts.classes,
        "outputs": facts.outputs,
        "transforms": facts.transforms,
        "versions": manifest.versions(),
    }


def _digest(dataset: Any) -> str | None:
    """Return a digest of the names of pictures, or of prompts; None for a split."""
    if isinstance(dataset, Pictures):
        return sha256(dataset.names.tobytes()).hexdigest()
    if isinstance(dataset, Prompts):
        text = json.dumps([[dataset.path(n), text] for n, text in enumerate(dataset.texts)])
        return sha256(text.encode()).hexdigest()
    return None


def _write_all(
    options: Options,
    predictor: Predictor,
    trainer: Trainer,
    loader: OnDevice,
    facts: InferenceFacts,
    header: dict[str, Any],
) -> None:
    resume = options.resume == "auto"
    if not trainer.is_main:
        start = trainer.group.broadcast(None)
        for _ in predictor(loader, start):
            pass
        return
    with _writing(options, facts, loader, header, resume) as writer:
        start = trainer.group.broadcast(writer.batches_done)
        if start:
            logger.info("going on after %d rows", writer.table.rows)
        with _resumable(options, writer):
            for answers in predictor(loader, start):
                writer.write(answers)
        writer.finish()
    print(writer.table.told())


@contextmanager
def _writing(
    options: Options,
    facts: InferenceFacts,
    loader: OnDevice,
    header: dict[str, Any],
    resume: bool,
) -> Iterator[_Writer]:
    with ExitStack() as stack:
        table = GrowingTable(options.table, header, header["batch_size"], resume)
        stack.callback(table.close)
        writer = _Writer(options, facts, loader, table, header)
        stack.callback(writer.close)
        yield writer


@contextmanager
def _resumable(options: Options, writer: _Writer) -> Iterator[None]:
    """Say how to go on where a signal ends it."""
    try:
        yield
    except (StoppedEarlyError, KeyboardInterrupt) as error:
        raise Interrupted(
            f"stopped after {writer.table.rows} of {len(writer.dataset)} samples, kept beside "
            f"{options.out}; go on with the same command and resume=auto",
            exit_code(error),
        ) from error


class _Writer:
    """Write the table, and what is wanted beside it."""

    def __init__(
        self,
        options: Options,
        facts: InferenceFacts,
        loader: OnDevice,
        table: GrowingTable,
        header: dict[str, Any],
    ) -> None:
        self.table = table
        self.batches_done = table.rows // loader.sampler.batch_size
        self.dataset = loader.dataset
        path, stem = options.table, options.table.stem
        masks = (
            MaskFiles(path.with_name(f"{stem}_masks")) if facts.outputs["kind"] == "mask" else None
        )
        prompts = self.dataset.texts if isinstance(self.dataset, Prompts) else None
        prompt_of = None if prompts is None else prompts.__getitem__
        self._rows = Rows(facts, options.top_k or 1, self._name, masks, prompt_of)
        self._drawings = None
        if options.draw:
            picture = picture_of(self.dataset, facts.inputs)
            self._drawings = Drawings(path.with_name(f"{stem}_pictures"), picture)
        self._array = None
        if options.array is not None:
            samples = len(self.dataset)
            self._array = ArrayFile(options.array, options.saved, samples, header, table.rows)

    def write(self, answers: Answers) -> None:
        """Write a batch's rows."""
        rows = list(self._rows(answers))
        order = sorted((*answers.indices, *answers.broken))
        if self._array is not None and answers.kept is not None:
            self._array.write(order, list(answers.indices), answers.kept)
        if self._drawings is not None:
            self._draw(order, answers, rows)
        self.table.write(rows)

    def finish(self) -> None:
        """Give the files their names, the table's last."""
        if self._array is not None:
            self._array.finish()
        self.table.finish()

    def close(self) -> None:
        """Let go of the array; the table is closed by whoever opened it."""
        if self._array is not None:
            self._array.close()

    def _draw(self, order: list[int], answers: Answers, rows: list[Row]) -> None:
        assert self._drawings is not None
        for index, row in zip(order, rows, strict=True):
            if index not in answers.broken:
                self._drawings(index, _label(row))

    def _name(self, index: int) -> str:
        return path_of(self.dataset, index) or str(index)


def _label(row: Row) -> str:
    prediction = row.get("prediction", "")
    text = ", ".join(prediction) if isinstance(prediction, list) else str(prediction)
    share = row.get("probability")
    return f"{text} {share:.0%}" if isinstance(share, float) else text
