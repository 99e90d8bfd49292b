"""Write a run's model in another format: verified, and complete or absent (I7)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import inputs_of
from data.errors import DataError
from trainer.assembly.data import build_data, build_pipeline
from trainer.assembly.loaders import eval_loader
from trainer.checkpoints.archive import digest, write_safetensors
from trainer.errors import ModelError
from trainer.export.card import how_to_load, model_card
from trainer.export.formats import (
    FORMATS,
    WEIGHTS,
    Answer,
    Network,
    Preprocessing,
    build_network,
    check_libraries,
    load_weights,
)
from trainer.files.atomic import (
    TEMPORARY,
    remove_orphans,
    storage_error,
    sync_folder,
    write_json,
    write_text,
)
from trainer.inference.predictor import named_tensors
from trainer.inference.run import Run, find_checkpoint
from trainer.runs import manifest
from trainer.runs.status import MANIFEST, read_json
from trainer.strategies.strategy import Strategy

logger = logging.getLogger("regimen")

FACTS = "export.json"
_SAMPLES = 32
_BATCHES = (1, 2, 3, _SAMPLES)
_TOLERANCE = 1e-4  # of the largest answer, at least of 1


@dataclass(frozen=True, slots=True)
class Exported:
    """The written files, the largest difference of their outputs to the model's, how to load."""

    folder: Path
    file: Path
    difference: float
    remark: str
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Exportable:
    """What is written as a graph: the network, samples of its inputs, and the facts about both."""

    network: Network
    samples: Tensor
    facts: dict[str, Any]


def export_run(
    run: Run,
    name: str,
    out: Path | None = None,
    preprocessing: Preprocessing = "outside",
    checkpoint: str = "best",
    overwrite: bool = False,
) -> Exported:
    """Write a run's model as `name` into the folder `out` (default: RUN/exports/NAME).

    Raises ModelError for a model that cannot be exported or whose file has other outputs,
    CheckpointError, StorageError. Nothing incomplete is left.
    """
    check_libraries(name)
    form = FORMATS[name]
    remark = form.remark
    with export_folder(run, out, name, overwrite) as (made, folder):
        file = made / form.file
        if name == WEIGHTS:
            facts = _write_weights(run, file, checkpoint)
        else:
            graph = graph_of(run, name, preprocessing, checkpoint)
            facts = graph.facts
            form.write(graph.network, graph.samples[:2].clone(), file, facts)
            answer = form.load(file, facts)
            difference = largest_difference(graph, file, answer, _TOLERANCE, 1.0)
            facts["verified"] |= {"largest_difference": difference}
            if form.compiles:
                facts["speed"] = speed = {}
                for size in (1, _SAMPLES):
                    batch = graph.samples[:size].clone()
                    speed[f"ms_of_{size}"] = milliseconds(answer, batch)
                    speed[f"eager_ms_of_{size}"] = milliseconds(graph.network, batch)
                remark += "".join(f"; {key} {value:.3g}" for key, value in speed.items())
        complete(run, made, folder, facts)
    lines = how_to_load(facts, folder)
    difference = facts["verified"]["largest_difference"]
    return Exported(folder, folder / form.file, difference, remark, lines)


def graph_of(run: Run, name: str, preprocessing: Preprocessing, checkpoint: str) -> Exportable:
    """Return the graph of a run's model. Raises ModelError."""
    model, task = run.model(checkpoint), run.trainer(checkpoint).task
    pipeline = build_pipeline(run.config, "eval")
    network, outside = build_network(model, task, pipeline, preprocessing)
    samples, real = samples_of(run, outside)
    verified: dict[str, Any] = {
        "samples": "of the run" if real else "random",
        "batch_sizes": list(_BATCHES),
    }
    if preprocessing == "inside" and real:
        plain = Network(model, task, nn.Sequential(), interprets=True).eval()
        with torch.inference_mode():
            trained = named_tensors(plain(samples_of(run, list(pipeline.steps))[0]))
            found = named_tensors(network(samples))
        moved = max(float(_off(found.get(n), value)[0].max()) for n, value in trained.items())
        verified["difference_of_preprocessing"] = moved
    kind = run.facts.outputs["kind"]
    facts = {
        "format": name,
        "file": FORMATS[name].file,
        "preprocessing": preprocessing,
        "transforms_of_the_caller": {n: run.facts.transforms[n] for n in outside},
        "input": {"shape": ["batch", *samples.shape[1:]], "dtype": _dtype(samples)},
        "output": kind if preprocessing == "inside" else "logits",
        "outputs": run.facts.outputs,
        "inputs": run.facts.inputs,
        "classes": run.facts.classes,
        "num_classes": run.facts.num_classes,
        "provenance": provenance(run, checkpoint),
        "verified": verified,
    }
    return Exportable(network, samples, facts)


def largest_difference(
    graph: Exportable,
    path: Path,
    answer: Answer,
    tolerance: float,
    least: float,
    squared: bool = False,
) -> float:
    """Return the largest difference of a file's outputs to its network's, over several batch sizes.

    Raises ModelError for one above `tolerance` of the largest output (which counts as at least
    `least`); squared: for a root mean square above it, as rounding leaves. Of class numbers the
    difference is 1 or 0.
    """
    largest = 0.0
    for size in _BATCHES:
        batch = graph.samples[:size].clone()
        with torch.inference_mode():
            wanted, found = named_tensors(graph.network(batch)), named_tensors(answer(batch))
        for name, value in wanted.items():
            off, scale = _off(found.get(name), value)
            said = float(off.square().mean().sqrt() if squared else off.max())
            largest = max(largest, float(off.max()))
            if not said <= tolerance * max(scale, least):
                raise ModelError(
                    f"the outputs of {path.name} differ from the model's (by {said:.2g} of "
                    f"{scale:.2g}, batch of {size}): "
                    + (
                        "its values do not fit 8 bits; callbacks=[default,qat] trains for them"
                        if squared
                        else "does its forward branch on its data, or draw random numbers?"
                    )
                )
    return largest


def _off(found: Tensor | None, wanted: Tensor) -> tuple[Tensor, float]:
    """Return the differences of an output, and the largest value of the one that is wanted."""
    if found is None or found.shape != wanted.shape:
        return torch.tensor([torch.inf]), 0.0
    if not wanted.is_floating_point():  # class numbers of pixels
        return (found != wanted).float(), 1.0
    return (found.to(wanted) - wanted).abs(), float(wanted.abs().max())


def complete(run: Run, made: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Write the facts and the card beside a model."""
    facts["sha256"] = digest(made / facts["file"])
    write_json(made / FACTS, facts)
    write_text(made / "card.md", model_card(run, facts, folder))


def provenance(run: Run, checkpoint: str) -> dict[str, Any]:
    """Return the provenance of a model: run, checkpoint and its results, data, versions."""
    path = find_checkpoint(run.path, checkpoint)
    trainer = run.trainer(checkpoint)
    average, step = trainer.average, trainer.state.global_step
    return {
        "run": str(run.path.absolute()),
        "name": run.config.name,
        "checkpoint": path.name,
        "sha256": digest(path),
        "step": step,
        "average": None if average is None else average.name,
        "results": {  # what was measured at its step is of this checkpoint
            key: value
            for line in run.metrics
            if line["step"] == step
            for key, value in line.items()
            if key.startswith(("val/", "test/")) and value is not None
        },
        "data": read_json(run.path / MANIFEST).get("data") or [],
        "config": (run.path / "config.yaml").read_text(encoding="utf-8"),
        "versions": manifest.versions(),
    }


def samples_of(run: Run, names: Sequence[str]) -> tuple[Tensor, bool]:
    """Return inputs after the named transforms: the run's, or random ones without its data."""
    kept = {name: run.config.transforms.eval[name] for name in names}
    transforms = replace(run.config.transforms, eval=kept)
    loader_options = replace(run.config.loader, num_workers=0, eval_batch_size=_SAMPLES)
    config = replace(run.config, transforms=transforms, loader=loader_options)
    for split in ("val", "test"):
        try:
            dataset = build_data(config, (split,)).sets[split]
        except DataError as error:
            logger.warning("the run's data are not there (%s): verified with random inputs", error)
            break
        if dataset is not None:
            loader = eval_loader(config, dataset, Strategy(torch.device("cpu")))
            inputs = inputs_of(next(iter(loader.epoch(0, 0, 1))).batch)
            if not isinstance(inputs, Tensor):
                kind = type(inputs).__name__
                raise ModelError(f"the model's input is a {kind}: only one tensor can be exported")
            inputs = inputs[:, 0] if inputs.ndim == 5 else inputs  # the caller averages over views
            return inputs[torch.arange(_SAMPLES) % len(inputs)], True
    form = run.facts.model_inputs
    if not form:
        raise ModelError(
            "the form of the model's inputs is not known, and the run's data are not there: "
            "put them back (data.root), or use format=safetensors"
        )
    shape = (_SAMPLES, *form["shape"][-3:])
    generator = torch.Generator().manual_seed(0)
    if len(kept) < len(run.config.transforms.eval):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), False
    return torch.randn(shape, dtype=getattr(torch, form["dtype"]), generator=generator), False


def milliseconds(answer: Callable[[Tensor], object], batch: Tensor) -> float:
    """Return the time of a call: the median of 20, after three for warm-up."""
    times = []
    with torch.inference_mode():
        for _ in range(23):
            begin = time.perf_counter()
            answer(batch)
            times.append(time.perf_counter() - begin)
    return 1e3 * median(times[3:])


def _write_weights(run: Run, path: Path, checkpoint: str) -> dict[str, Any]:
    """Write the weights and the configuration; a newly built model must load them."""
    weights: Mapping[str, Tensor] = run.model(checkpoint).state_dict()
    facts: dict[str, Any] = {
        "format": WEIGHTS,
        "file": path.name,
        "model": run.facts.model,
        "transforms_of_the_caller": run.facts.transforms,
        "input": run.facts.model_inputs,
        "output": "logits",
        "classes": run.facts.classes,
        "provenance": provenance(run, checkpoint),
    }
    write_safetensors(path, weights, {"regimen": json.dumps(facts)})
    shutil.copyfile(run.path / "config.yaml", path.with_name("config.yaml"))
    bare = load_weights(path, facts).state_dict()
    if not all(torch.equal(value, weights[name].cpu()) for name, value in bare.items()):
        raise ModelError(f"{path.name}: a bare model does not hold the weights that were written")
    facts["verified"] = {"samples": "weights, bit for bit", "largest_difference": 0.0}
    return facts


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def export_folder(
    run: Run, out: Path | None, name: str, overwrite: bool
) -> Iterator[tuple[Path, Path]]:
    """Yield a folder to write into, and its final path, which it gets at the end (I7).

    out: default RUN/exports/NAME. Raises ModelError for a folder that exists and may not be
    replaced, StorageError.
    """
    folder = out or run.path / "exports" / name
    if folder.exists() and not overwrite:
        raise ModelError(f"out={folder} exists: overwrite=true replaces it")
    if folder.exists() and not (folder / FACTS).is_file():
        raise ModelError(f"out={folder} is no export: it has no {FACTS}, so it is not replaced")
    try:
        folder.parent.mkdir(parents=out is None, exist_ok=True)
        if out is None:
            remove_orphans(folder.parent)  # of a command that was killed
        made = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
        held = os.open(made, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        yield made, folder
        os.umask(mask := os.umask(0))
        made.chmod(0o777 & ~mask)
        old = made.with_name(f"{made.name}-old")
        if folder.exists():  # moved away whole before it is removed
            os.replace(folder, old)
        os.replace(made, folder)
        shutil.rmtree(old, ignore_errors=True)
        sync_folder(folder.parent)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)
