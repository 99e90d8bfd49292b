"""Export a run's model, verified, complete or absent (I7); and evaluate an exported file."""

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
from regimen.trainer.assembly.experiment import build_evaluator
from regimen.trainer.assembly.loaders import eval_loader
from regimen.trainer.checkpoints.archive import digest, read_safetensors, write_safetensors
from regimen.trainer.checkpoints.reader import compare_names
from regimen.trainer.errors import ModelError, short_message
from regimen.trainer.export.boxes import (
    FORMATS,
    BoxNetwork,
    box_answer,
    box_difference,
    describe_boxes,
    write_boxes,
)
from regimen.trainer.export.formats import (
    GRAPHS,
    WEIGHTS,
    Answer,
    Exportable,
    Facts,
    Network,
    Preprocessing,
    build_network,
    check_libraries,
    model_card,
    provenance,
)
from regimen.trainer.export.huggingface import (
    FOLDERS,
    load_folder,
    random_tokens,
    write_folder,
    write_tokenizer,
)
from regimen.trainer.files.atomic import (
    TEMPORARY,
    storing,
    sync_folder,
    write_json,
    write_text,
)
from regimen.trainer.inference.predictor import named_tensors
from regimen.trainer.inference.run import Run, measured, open_splits, pictures_for
from regimen.trainer.runs.status import read_json
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.instantiate import instantiate
from regimen.trainer.task import Task
from regimen.trainer.tasks.supervised import Supervised

logger = logging.getLogger("regimen")

FACTS = "export.json"
# The values of `export.json` that an evaluation of the file needs, and their types.
_FORM: Mapping[str, Any] = {
    **dict.fromkeys(("format", "file", "sha256", "output"), str),
    **dict.fromkeys(("transforms_of_the_caller", "model"), dict),
    "num_classes": int | None,
}
_FILES: Mapping[str, str] = {
    WEIGHTS: "model.safetensors",
    **FOLDERS,
    **{name: form.file for name, form in GRAPHS.items()},
}
_SAMPLES = 32
_BATCHES = (1, 2, 3, _SAMPLES)
_OTHER_BASE = (
    "have the weights that model.name names changed, or were others trained beside the adapters? "
    "format=huggingface has them all"
)
_ANY_SIZE = (256, 256)  # of random pictures, if the transforms bring any picture to one size
_EVALUATED = ("logits", "classes", "labels", "values", "mask", "boxes")  # outputs that have metrics


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

    write: used instead of the format's own function; it must verify what it has written. Returns
    the file, and the facts that are written beside it. Raises ModelError for a model that cannot
    be exported or whose file has other outputs, CheckpointError, StorageError. Nothing incomplete
    is left.
    """
    finds_boxes = run.facts.outputs["kind"] == "boxes"
    if finds_boxes and (name not in FORMATS or write is not None):
        what = f"format={name}" if write is None else "quantize"
        raise ModelError(
            f"{what} does not take a detector, whose answers are lists of any length: "
            f"regimen export with format={', '.join(FORMATS)} does"
        )
    if name in GRAPHS:
        check_libraries(name)
    folder = out or run.path / "exports" / (name if write is None else "quantized")
    with _new_folder(folder, overwrite) as made:
        facts = run.facts._asdict() | {
            "format": name,
            "file": _FILES[name],
            "transforms_of_the_caller": run.facts.transforms,
            "input": run.facts.inputs,
            "output": "logits",
            "provenance": provenance(run, checkpoint),
        }
        path = made / facts["file"]
        if name == WEIGHTS:
            _write_weights(run.model(checkpoint), path, facts)
            write_text(made / "config.yaml", facts["provenance"]["config"])
        elif name in FOLDERS:
            _write_folder(run, made, facts, checkpoint)
        else:
            graph_of = _box_graph_of if finds_boxes else _graph_of
            graph = graph_of(run, facts, preprocessing, checkpoint)
            write_graph = write or _write_graph
            write_graph(graph, path)
        facts["sha256"] = digest(path)
        write_json(made / FACTS, facts)
        write_text(made / "card.md", model_card(run, facts, folder))
    return folder / path.name, facts


def _graph_of(run: Run, facts: Facts, preprocessing: Preprocessing, checkpoint: str) -> Exportable:
    """Return the graph of a run's model, and add what is known of it to `facts`.

    Raises ModelError.
    """
    model = run.model(checkpoint)
    task = run.components(checkpoint).task
    network, outside = build_network(model, task, build_pipeline(run.config, "eval"), preprocessing)
    samples, whose = _samples_asked(run, outside, model, task)
    dtype = str(samples.dtype).removeprefix("torch.")
    facts["preprocessing"] = preprocessing
    facts["transforms_of_the_caller"] = {name: run.facts.transforms[name] for name in outside}
    facts["input"] = {"shape": ["batch", *samples.shape[1:]], "dtype": dtype}
    facts["verified"] = {"samples": whose, "batch_sizes": list(_BATCHES)}
    if preprocessing == "inside":
        facts["output"] = run.facts.outputs["kind"]
    return Exportable(network, samples, facts)


def _box_graph_of(
    run: Run, facts: Facts, preprocessing: Preprocessing, checkpoint: str
) -> Exportable:
    """Return the graph of a detector, and add what is known of it to `facts`.

    Raises ModelError for a run whose data do not bring pictures to a fixed size.
    """
    model = run.model(checkpoint)
    if "fitted" not in run.facts.inputs:
        raise ModelError(
            "the size of the detector's pictures is not known: a run on data=detection brings them "
            "to data.image_size; format=safetensors writes the weights of any other"
        )
    task = run.components(checkpoint).task
    samples, whose = _samples_asked(run, run.facts.transforms, model, task)
    if preprocessing == "inside":
        samples = (samples * 255).round().to(torch.uint8)
    facts["preprocessing"] = preprocessing
    facts["verified"] = {"samples": whose, "batch_sizes": [1]}
    describe_boxes(facts, samples)
    return Exportable(BoxNetwork(model, task, preprocessing == "inside"), samples, facts)


def _write_graph(graph: Exportable, path: Path) -> None:
    facts = graph.facts
    form = GRAPHS[facts["format"]]
    if isinstance(graph.network, BoxNetwork):
        write_boxes(graph, path)
        difference = box_difference(graph, form.load(path))
    else:
        form.write(graph, path)
        difference = largest_difference(graph, form.load(path))
    facts["verified"]["largest_difference"] = difference
    facts["notes"] = [form.remark] if form.remark else []


def _write_folder(run: Run, folder: Path, facts: Facts, checkpoint: str) -> None:
    """Write a folder of transformers or peft, which the library must read as the model.

    Raises ModelError.
    """
    trained = run.model(checkpoint)
    model, more = write_folder(trained, facts["format"], folder)
    facts |= more
    missing = write_tokenizer(run.config.data.train, folder)
    facts["tokenizer"] = missing is None
    facts["notes"] = [missing] if missing else []
    samples = random_tokens(model, _SAMPLES)
    whose = "random"
    if samples is None:
        task = run.components(checkpoint).task
        samples, whose = _samples_asked(run, run.config.transforms.eval, trained, task)
    facts["verified"] = {"samples": whose, "batch_sizes": list(_BATCHES)}
    asked = Exportable(Network(model, Task()), samples, facts)
    try:
        difference = largest_difference(
            asked,
            load_folder(folder, facts),
            reason=_OTHER_BASE,
        )
    except ModelError:
        raise
    except Exception as error:  # of a stranger's model or file
        raise ModelError(
            f"format={facts['format']}: what was written cannot be read again, or asked: "
            f"{short_message(error)}; format=safetensors may do"
        ) from error
    facts["verified"]["largest_difference"] = difference


def largest_difference(
    graph: Exportable,
    answer: Answer,
    quantized: bool = False,
    tolerance: float = 1e-4,
    reason: str = "does its forward branch on its data, or draw random numbers?",
) -> float:
    """Return the largest difference of a file's outputs to its network's, over several batch sizes.

    For class numbers it is 1 or 0. Raises ModelError, with a `reason`, for one above `tolerance` of
    the largest output, which counts as at least 1; `quantized`: for a root mean square above a
    tenth of the largest output, since rounding leaves about that much. Waits for the device, for
    each output.
    """
    smallest_scale = 1.0
    if quantized:
        tolerance = 0.1
        smallest_scale = 1e-6
        reason = "its values do not fit 8 bits; callbacks=[default,qat] trains for them"
    largest = 0.0
    for size in _BATCHES:
        batch = graph.samples[:size].clone()
        with torch.inference_mode():
            expected = named_tensors(graph.network(batch))
            outputs = named_tensors(answer(batch))
        for name, value in expected.items():
            errors, scale = _errors(value, outputs.get(name))
            error = float(errors.max())
            largest = max(largest, error)
            if quantized:
                error = float(errors.square().mean().sqrt())
            # Negated: NaN is not below the tolerance either.
            if not error <= tolerance * max(scale, smallest_scale):
                raise ModelError(
                    f"the outputs of the {graph.facts['format']} file differ from the model's "
                    f"(by {error:.2g} of {scale:.2g}, batch of {size}): {reason}"
                )
    return largest


def _errors(expected: Tensor, output: Tensor | None) -> tuple[Tensor, float]:
    """Return the absolute errors of an output, and the largest value that was expected."""
    if output is None or output.shape != expected.shape:
        return torch.tensor([torch.inf]), 0.0
    if not expected.is_floating_point():  # class numbers of pixels
        return (output != expected).float(), 1.0
    return (output.to(expected) - expected).abs(), float(expected.abs().max())


def samples_of(run: Run, names: Iterable[str]) -> tuple[Tensor, bool]:
    """Return inputs after the named transforms, and whether they are the run's or random ones.

    They are random if the run's data cannot be read. Raises ModelError.
    """
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
            inputs = one_tensor(next(iter(loader.epoch(0, 0, 1))).batch)
            # A small data set is repeated.
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
    if "fitted" in form:
        fit = pictures_for(run.facts, config, []).resize_and_transform
        return torch.stack([inputs_of(fit(picture)) for picture in pictures]), False
    pipeline = build_pipeline(config, "eval")
    return torch.stack([pipeline(picture) for picture in pictures]), False


def one_tensor(batch: Any) -> Tensor:
    """Return a batch's inputs. Raises ModelError where they are not one tensor."""
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor):
        raise ModelError(
            f"the model's input is a {type(inputs).__name__}: only one tensor can be exported"
        )
    return inputs


def one_view(inputs: Tensor, dimensions: int) -> Tensor:
    """Return inputs [n, ...] of `dimensions` dimensions; of several views a sample the first.

    Whoever asks the file averages over the views, as the task does.
    """
    return inputs[:, 0] if inputs.ndim > dimensions else inputs


def _samples_asked(
    run: Run, names: Iterable[str], model: nn.Module, task: Task
) -> tuple[Tensor, str]:
    """Return samples after the named transforms as a task gives them to its model, and whose."""
    samples, are_real = samples_of(run, names)
    if samples.ndim == 5:
        # Videos and volumes go to the model as they are, views of a sample one by one.
        asked: list[Tensor] = []
        hook = model.register_forward_pre_hook(lambda module, given: asked.extend(given))
        with hook, torch.no_grad():
            task.prediction_step(model, samples[:1])
        samples = one_view(samples, asked[0].ndim)
    return samples, "of the run" if are_real else "random"


def with_transforms(config: Config, names: Iterable[str]) -> Config:
    """Return a configuration with only the named transforms of evaluation. Raises ModelError."""
    available = config.transforms.eval
    steps = {}
    for name in names:
        if name not in available:
            raise ModelError(f"the file needs transforms.eval.{name}, which the run does not have")
        steps[name] = available[name]
    return replace(config, transforms=replace(config.transforms, eval=steps))


def _write_weights(model: nn.Module, path: Path, facts: Facts) -> None:
    """Write the weights; a newly built model must load them, bit for bit."""
    weights = model.state_dict()
    write_safetensors(path, weights, {"regimen": json.dumps(facts)})
    for name, value in _load_weights(path, facts).state_dict().items():
        if not torch.equal(value, weights[name].cpu()):
            raise ModelError(
                f"{path.name}: a bare model does not hold the weights that were written"
            )
    facts["verified"] = {"samples": "weights, bit for bit", "largest_difference": 0.0}


def _load_weights(path: Path, facts: Facts) -> nn.Module:
    """Return the network that `facts` describe, with the weights of a file, for evaluation."""
    weights = read_safetensors(path)
    # First without memory: the network that `facts` describe may be larger than the file.
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
            shutil.rmtree(made, ignore_errors=True)  # left by a command that was killed
            made.mkdir()
            yield made
            # Renamed as a whole: at no moment is a folder incomplete.
            if folder.exists():
                os.replace(folder, old)
            os.replace(made, folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


class _Answering(nn.Module):
    """A loaded file as a module with the outputs (logits) that a task expects of a model."""

    def __init__(self, answer: Answer, facts: Facts) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule: a program has no evaluation mode to enter.
        self._answer = (answer,)
        self._output = facts["output"]
        self._num_classes = facts.get("num_classes")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._output == "boxes":
            (images,) = inputs
            return [box_answer(self._answer[0], images[n : n + 1]) for n in range(len(images))]
        answer = self._answer[0](*inputs, **named)
        if self._output == "classes":
            return torch.log(answer)  # the task's softmax returns the probabilities again
        if self._output == "labels":
            return torch.logit(answer)
        if self._output == "mask":
            # Class numbers [n, H, W]: as logits [n, classes, H, W], the class at hand the largest.
            return nn.functional.one_hot(answer, self._num_classes or -1).movedim(-1, 1).float()
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
    if kind not in _FILES:
        raise ModelError(f"artefact={path} has the unknown format {kind!r:.80}: export again")
    described = (facts.get("file"), facts.get("sha256"))
    if not path.is_file() or described != (path.name, digest(path)):
        raise ModelError(
            f"artefact={path} is not the file that {FACTS} beside it describes: export again"
        )
    if facts["output"] not in _EVALUATED:
        raise ModelError(
            f"artefact={path} has the output {facts['output']!r:.80}, not one of "
            f"{', '.join(_EVALUATED)}"
        )
    if form is not None and form.runs_code and not allow_code:
        raise ModelError(
            f"artefact={path} runs code when it is loaded: set allow_code=true if you trust its "
            "author"
        )
    try:
        if form is not None:
            answer = form.load(path)
        elif kind in FOLDERS:
            answer = load_folder(path.parent, facts)
        else:
            answer = _load_weights(path, facts)
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

    It computes on the CPU in single precision. A file that returns masks has no logits to compute
    the loss from: the losses are left out. Raises ModelError for a transform that the run does not
    have, and for another number of classes.
    """
    config = with_transforms(config, facts["transforms_of_the_caller"])
    options = replace(config.trainer, precision="fp32", channels_last=False, compile=False)
    config = replace(config, trainer=options)
    strategy = Strategy("cpu")
    opened = open_splits(config, strategy, split, classes)
    _, num_classes = next(iter(opened.values()))
    of_file = facts.get("num_classes")
    if of_file is not None and num_classes is not None and of_file != num_classes:
        raise ModelError(f"the file has {of_file} classes, the data of the run {num_classes}")
    answering = _Answering(answer, facts)
    components = build_evaluator(config, of_file or num_classes, strategy, answering, classes)
    split, metrics = measured(components, opened)
    if facts["output"] == "mask" and isinstance(components.task, Supervised):
        for stage, name in product(opened, components.task.losses.names):
            metrics.pop(f"{stage}/{name}", None)
    return split, metrics
