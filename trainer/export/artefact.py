"""A run's model in another format: written verified, and complete or absent (I7); and tested."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.conf.json_text import form_fault
from regimen.conf.schema import Config
from regimen.data.batch import inputs_of
from regimen.data.errors import DataError
from regimen.models.pretrained import no_initial_weights
from regimen.trainer.assembly.data import build_data, build_pipeline
from regimen.trainer.assembly.experiment import build_evaluator, eval_loader
from regimen.trainer.checkpoints.archive import digest, read_safetensors, write_safetensors
from regimen.trainer.checkpoints.reader import compare_names
from regimen.trainer.errors import ModelError, short_message
from regimen.trainer.export.formats import (
    GRAPHS,
    WEIGHTS,
    Answer,
    Exportable,
    Facts,
    Preprocessing,
    build_network,
    check_libraries,
    model_card,
    provenance,
)
from regimen.trainer.files.atomic import (
    TEMPORARY,
    storing,
    sync_folder,
    write_json,
    write_text,
)
from regimen.trainer.inference.predictor import named_tensors
from regimen.trainer.inference.run import Run, measured, open_splits
from regimen.trainer.runs.status import read_json
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.instantiate import instantiate
from regimen.trainer.tasks.supervised import Supervised

logger = logging.getLogger("regimen")

FACTS = "export.json"
# Of `export.json`, what a test of its file uses.
_FORM: Mapping[str, Any] = {
    **dict.fromkeys(("format", "file", "sha256", "output"), str),
    **dict.fromkeys(("transforms_of_the_caller", "model"), dict),
    "num_classes": int | None,
}
_SAMPLES = 32
_BATCHES = (1, 2, 3, _SAMPLES)
_ANY_SIZE = (256, 256)  # of pictures that the transforms bring to one size
_EVALUATED = ("logits", "classes", "labels", "values", "mask")  # outputs that a task can measure


def export_run(
    run: Run,
    name: str,
    out: Path | None = None,
    preprocessing: Preprocessing = "outside",
    checkpoint: str = "best",
    overwrite: bool = False,
    write: Callable[[Exportable, Path], None] | None = None,
) -> tuple[Path, Facts]:
    """Write a run's model as `name` into the folder `out` (default: RUN/exports/NAME).

    write: replaces the format's own way, and verifies what it has written. Returns the file, and
    the facts that stand beside it. Raises ModelError for a model that cannot be exported or whose
    file has other outputs, CheckpointError, StorageError. Nothing incomplete is left.
    """
    if name != WEIGHTS:
        check_libraries(name)
    folder = out or run.path / "exports" / (name if write is None else "quantized")
    with _new_folder(folder, overwrite) as made:
        facts = run.facts._asdict() | {
            "format": name,
            "file": "model.safetensors" if name == WEIGHTS else GRAPHS[name].file,
            "transforms_of_the_caller": run.facts.transforms,
            "input": run.facts.inputs,
            "output": "logits",
            "provenance": provenance(run, checkpoint),
        }
        path = made / facts["file"]
        if name == WEIGHTS:
            _write_weights(run.model(checkpoint), path, facts)
            write_text(made / "config.yaml", facts["provenance"]["config"])
        else:
            (write or _write_graph)(_graph_of(run, facts, preprocessing, checkpoint), path)
        facts["sha256"] = digest(path)
        write_json(made / FACTS, facts)
        write_text(made / "card.md", model_card(run, facts, folder))
    return folder / path.name, facts


def _graph_of(run: Run, facts: Facts, preprocessing: Preprocessing, checkpoint: str) -> Exportable:
    """Return the graph of a run's model; `facts` grow by those about it. Raises ModelError."""
    model, task = run.model(checkpoint), run.trainer(checkpoint).task
    network, outside = build_network(model, task, build_pipeline(run.config, "eval"), preprocessing)
    samples, real = samples_of(run, outside)
    dtype = str(samples.dtype).removeprefix("torch.")
    facts |= {
        "preprocessing": preprocessing,
        "transforms_of_the_caller": {n: run.facts.transforms[n] for n in outside},
        "input": {"shape": ["batch", *samples.shape[1:]], "dtype": dtype},
        "verified": {"samples": "of the run" if real else "random", "batch_sizes": list(_BATCHES)},
    }
    if preprocessing == "inside":
        facts["output"] = run.facts.outputs["kind"]
    return Exportable(network, samples, facts)


def _write_graph(graph: Exportable, path: Path) -> None:
    form, facts = GRAPHS[graph.facts["format"]], graph.facts
    form.write(graph, path)
    facts["verified"]["largest_difference"] = largest_difference(graph, form.load(path))
    facts["notes"] = [form.remark] if form.remark else []


def largest_difference(graph: Exportable, answer: Answer, quantized: bool = False) -> float:
    """Return the largest difference of a file's outputs to its network's, over several batch sizes.

    Of class numbers it is 1 or 0. Raises ModelError for one above 1e-4 of the largest output, which
    counts as at least 1; quantized: for a root mean square above a tenth of it, as rounding leaves.
    """
    largest = 0.0
    tolerance, least = (0.1, 1e-6) if quantized else (1e-4, 1.0)
    reason = "does its forward branch on its data, or draw random numbers?"
    if quantized:
        reason = "its values do not fit 8 bits; callbacks=[default,qat] trains for them"
    for size in _BATCHES:
        batch = graph.samples[:size].clone()
        with torch.inference_mode():
            wanted, found = named_tensors(graph.network(batch)), named_tensors(answer(batch))
        for name, value in wanted.items():
            off, scale = _difference(value, found.get(name))
            largest = max(largest, float(off.max()))
            told = float(off.square().mean().sqrt() if quantized else off.max())
            if not told <= tolerance * max(scale, least):
                raise ModelError(
                    f"the outputs of the {graph.facts['format']} file differ from the model's "
                    f"(by {told:.2g} of {scale:.2g}, batch of {size}): {reason}"
                )
    return largest


def _difference(value: Tensor, found: Tensor | None) -> tuple[Tensor, float]:
    """Return how far an output is from the network's, and the network's largest value."""
    if found is None or found.shape != value.shape:
        return torch.tensor([torch.inf]), 0.0
    if not value.is_floating_point():  # class numbers of pixels
        return (found != value).float(), 1.0
    return (found.to(value) - value).abs(), float(value.abs().max())


def samples_of(run: Run, names: Iterable[str]) -> tuple[Tensor, bool]:
    """Return inputs after the named transforms: the run's, or random ones without its data."""
    config = with_transforms(run.config, names)
    config = replace(config, loader=replace(config.loader, num_workers=0, eval_batch_size=_SAMPLES))
    for split in (*config.data.validations, *config.data.tests):
        try:
            dataset = build_data(config, (split,)).sets[split]
        except DataError as error:
            logger.warning("the run's data are not there (%s): verified with random inputs", error)
            break
        if dataset is not None:
            loader = eval_loader(config, dataset, Strategy("cpu"))
            inputs = one_view(next(iter(loader.epoch(0, 0, 1))).batch)
            return inputs[torch.arange(_SAMPLES) % len(inputs)], True
    form = run.facts.inputs
    if form["kind"] != "picture":
        raise ModelError(
            "the form of the model's inputs is not known, and the run's data are not there: "
            "put them back (data.root), or use format=safetensors"
        )
    shape = (_SAMPLES, form["channels"], *(form["size"] or _ANY_SIZE))
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.stack([*map(build_pipeline(config, "eval"), pictures)]), False


def one_view(batch: Any) -> Tensor:
    """Return a batch's inputs, of several views the first: the caller averages over them."""
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor):
        kind = type(inputs).__name__
        raise ModelError(f"the model's input is a {kind}: only one tensor can be exported")
    return inputs[:, 0] if inputs.ndim == 5 else inputs


def with_transforms(config: Config, names: Iterable[str]) -> Config:
    """Return a configuration with only the named transforms of evaluation. Raises ModelError."""
    steps = config.transforms.eval
    try:
        kept = {name: steps[name] for name in names}
    except KeyError as error:
        message = f"the file needs transforms.eval.{error.args[0]}, which the run does not have"
        raise ModelError(message) from None
    return replace(config, transforms=replace(config.transforms, eval=kept))


def _write_weights(model: nn.Module, path: Path, facts: Facts) -> None:
    """Write the weights; a newly built model must load them."""
    weights = model.state_dict()
    write_safetensors(path, weights, {"regimen": json.dumps(facts)})
    bare = _load_weights(path, facts).state_dict()
    if not all(torch.equal(value, weights[name].cpu()) for name, value in bare.items()):
        raise ModelError(f"{path.name}: a bare model does not hold the weights that were written")
    facts["verified"] = {"samples": "weights, bit for bit", "largest_difference": 0.0}


def _load_weights(path: Path, facts: Facts) -> nn.Module:
    weights = read_safetensors(path)
    # First without memory: what `facts` say of a network may be larger than what the file holds.
    with torch.device("meta"), no_initial_weights():
        planned: nn.Module = instantiate(facts["model"], _key_="model")
    compare_names({"model": weights}, planned.state_dict(), path)
    with no_initial_weights():
        model: nn.Module = instantiate(facts["model"], _key_="model")
    model.load_state_dict(weights)
    return model.eval()


@contextmanager
def _new_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a folder to write into, which takes the place of `folder` at the end (I7).

    Raises ModelError for a folder that exists and may not be replaced, StorageError.
    """
    if folder.exists() and not (overwrite and (folder / FACTS).is_file()):
        raise ModelError(f"out={folder} exists: overwrite=true replaces it if it holds {FACTS}")
    made = folder.with_name(f"{TEMPORARY}{folder.name[:100]}")
    old = made.with_name(f"{made.name}-old")
    try:
        with storing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(made, ignore_errors=True)  # of a command that was killed
            made.mkdir()
            yield made
            if folder.exists():  # moved away whole before it is removed
                os.replace(folder, old)
            os.replace(made, folder)
            sync_folder(folder.parent)
    finally:
        for left in (made, old):
            shutil.rmtree(left, ignore_errors=True)


class _Answering(nn.Module):
    """A file as a module with the outputs (logits) that a task expects of a model."""

    def __init__(self, answer: Answer, facts: Facts) -> None:
        super().__init__()
        self._answer = (answer,)  # no submodule: a program has no evaluation mode to enter
        self._kind, self._classes = facts["output"], facts.get("num_classes")

    def forward(self, x: Tensor) -> Any:
        answer = self._answer[0](x)
        if self._kind == "classes":  # of probabilities: their softmax is the same
            return torch.log(answer)
        if self._kind == "labels":
            return torch.logit(answer)
        if self._kind == "mask":  # class numbers [n, H, W] as [n, classes, H, W] that rank them
            return nn.functional.one_hot(answer, self._classes or -1).movedim(-1, 1).float()
        return answer


def evaluate_artefact(
    config: Config,
    path: Path,
    split: str | None = None,
    allow_code: bool = False,
    classes: Sequence[str] | None = None,
) -> tuple[str, dict[str, float]]:
    """Return the split and the metrics of an exported file, as `evaluate_run` does for a model.

    Raises ModelError for a file that was not exported by Regimen or cannot be loaded, and for one
    whose format runs code when it is read unless `allow_code`.
    """
    facts = read_json(path.parent / FACTS)
    fault = form_fault(facts, _FORM) if facts else None
    if fault is not None:
        raise ModelError(f"artefact={path}: {FACTS} beside it is damaged ({fault}): export again")
    kind = facts.get("format", WEIGHTS)
    form = GRAPHS.get(kind)
    described = facts.get("file"), facts.get("sha256")
    if form is None and kind != WEIGHTS:
        fault = f" has the unknown format {kind!r:.80}: export again"
    elif not path.is_file() or described != (path.name, digest(path)):
        fault = f" is not the file that {FACTS} beside it describes: export again"
    elif facts["output"] not in _EVALUATED:
        fault = f" has the output {facts['output']!r:.80}, not one of {', '.join(_EVALUATED)}"
    elif form is not None and form.runs_code and not allow_code:
        fault = " runs code when it is loaded: set allow_code=true if you trust its author"
    if fault is not None:
        raise ModelError(f"artefact={path}{fault}")
    try:
        answer = _load_weights(path, facts) if form is None else form.load(path)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"artefact={path} cannot be loaded: {short_message(error)}") from error
    return metrics_of(config, answer, facts, split, classes)


def metrics_of(
    config: Config,
    answer: Answer,
    facts: Facts,
    split: str | None,
    classes: Sequence[str] | None,
) -> tuple[str, dict[str, float]]:
    """Return the split, and the metrics over it of a file that `answer` has loaded.

    It computes on the CPU in single precision. Of a file that answers with masks no loss is known.
    Raises ModelError for a transform that the run does not have.
    """
    options: Any = {"precision": "fp32", "channels_last": False, "compile": False}
    config = with_transforms(config, facts["transforms_of_the_caller"])
    config = replace(config, trainer=replace(config.trainer, **options))
    strategy = Strategy("cpu")
    opened = open_splits(config, strategy, split, classes)
    _, num_classes = next(iter(opened.values()))
    told = facts.get("num_classes")
    if told is not None and num_classes is not None and told != num_classes:
        raise ModelError(f"the file has {told} classes, the data of the run {num_classes}")
    answering = _Answering(answer, facts)
    trainer = build_evaluator(config, told or num_classes, strategy, answering, classes)
    split, metrics = measured(trainer, opened)
    if facts["output"] == "mask" and isinstance(trainer.task, Supervised):
        for one, name in product(opened, trainer.task.losses.names):
            metrics.pop(f"{one}/{name}", None)
    return split, metrics
