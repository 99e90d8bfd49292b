"""Write a run's model in another format: verified, and complete or absent (I7)."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batch import inputs_of
from data.errors import DataError
from models.weights import no_initial_weights
from trainer.build.data import build_data, build_pipeline, eval_loader
from trainer.checkpoints.archive import digest
from trainer.checkpoints.weights import read_safetensors, write_safetensors
from trainer.errors import ModelError
from trainer.export.card import model_card
from trainer.export.folder import FACTS, export_folder
from trainer.export.formats import FORMATS, check_libraries, speed_of_package
from trainer.export.network import Network, Preprocessing, build_network
from trainer.files.atomic import write_json, write_text
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.run import Run
from trainer.runs import manifest
from trainer.runs.status import MANIFEST, read_json, read_status
from trainer.strategies.strategy import Strategy
from trainer.targets.instantiate import instantiate

logger = logging.getLogger("regimen")

WEIGHTS = "safetensors"
_SAMPLES = 32
BATCHES = (1, 2, 3, _SAMPLES)
_TOLERANCE = 1e-4  # of the largest answer, at least of 1


@dataclass(frozen=True, slots=True)
class Exported:
    """The written files, and the largest difference of their outputs to the model's."""

    folder: Path
    file: Path
    difference: float
    remark: str


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
    if name in FORMATS:
        check_libraries(name)
    write = _write_weights if name == WEIGHTS else _write_graph
    with export_folder(run, out, name, overwrite) as (made, folder):
        file, facts = write(run, name, made, preprocessing, checkpoint)
        complete(run, made, facts)
    remark = FORMATS[name].remark if name in FORMATS else ""
    for key, value in facts.get("speed", {}).items():
        remark += f"; {key} {value:.3g}"
    return Exported(folder, folder / file, facts["verified"]["largest_difference"], remark)


def complete(run: Run, made: Path, facts: dict[str, Any]) -> None:
    """Write the facts and the card beside a model."""
    facts["sha256"] = digest(made / facts["file"])
    write_json(made / FACTS, facts)
    write_text(made / "card.md", model_card(run, facts))


def provenance(run: Run, checkpoint: str) -> dict[str, Any]:
    """Return the provenance of a model: run, checkpoint, results, versions."""
    path = find_checkpoint(run.path, checkpoint)
    trainer = run.trainer(checkpoint)
    average = trainer.average
    return {
        "run": str(run.path.absolute()),
        "name": run.config.name,
        "checkpoint": path.name,
        "sha256": digest(path),
        "step": trainer.state.global_step,
        "average": None if average is None else average.name,
        "results": read_status(run.path).get("results") or {},
        "data": read_json(run.path / MANIFEST).get("data") or [],
        "config": (run.path / "config.yaml").read_text(encoding="utf-8"),
        "versions": manifest.versions(),
    }


def _write_graph(
    run: Run, name: str, folder: Path, preprocessing: Preprocessing, checkpoint: str
) -> tuple[str, dict[str, Any]]:
    form = FORMATS[name]
    model, task = run.model(checkpoint), run.trainer(checkpoint).task
    pipeline = build_pipeline(run.config, "eval")
    network, outside = build_network(model, task, pipeline, preprocessing)
    network.eval()
    samples, real = samples_of(run, outside)
    facts = graph_facts(run, name, form.file, preprocessing, outside, samples, checkpoint)
    form.write(network, samples[:2].clone(), folder / form.file, facts)
    with tempfile.TemporaryDirectory(prefix="regimen-") as scratch:
        difference = _verify(network, folder / form.file, samples, form.answer, Path(scratch))
    facts["verified"] = verified = verification(real, difference)
    if form.compiles:
        facts["speed"] = speed_of_package(network, folder / form.file, samples)
    if preprocessing == "inside" and real:
        plain = Network(model, task, torch.nn.Sequential(), interprets=True).eval()
        with torch.inference_mode():
            trained = plain(samples_of(run, list(pipeline.steps))[0])
            moved = _largest(network(samples), trained)
        verified["difference_of_preprocessing"] = moved
    return form.file, facts


def graph_facts(
    run: Run,
    name: str,
    file: str,
    preprocessing: Preprocessing,
    outside: Sequence[str],
    samples: Tensor,
    checkpoint: str,
) -> dict[str, Any]:
    """Return the facts that users of a graph need, and its provenance."""
    return {
        "format": name,
        "file": file,
        "preprocessing": preprocessing,
        "transforms_of_the_caller": {n: run.facts.transforms[n] for n in outside},
        "input": {"shape": ["batch", *samples.shape[1:]], "dtype": _dtype(samples)},
        "output": run.facts.outputs["kind"] if preprocessing == "inside" else "logits",
        "outputs": run.facts.outputs,
        "inputs": run.facts.inputs,
        "classes": run.facts.classes,
        "num_classes": run.facts.num_classes,
        "provenance": provenance(run, checkpoint),
    }


def verification(real: bool, difference: float) -> dict[str, Any]:
    """Return how a file was compared with its model."""
    return {
        "samples": "of the run" if real else "random",
        "batch_sizes": list(BATCHES),
        "largest_difference": difference,
    }


def _verify(
    network: Network,
    path: Path,
    samples: Tensor,
    answer: Callable[[Path, Sequence[Tensor], Path], list[Tensor]],
    scratch: Path,
) -> float:
    """Return the largest difference to the model over several batch sizes. Raises ModelError."""
    questions = [samples[:size].clone() for size in BATCHES]
    with torch.inference_mode():
        expected = [network(question) for question in questions]
    largest = 0.0
    for asked, wanted, found in zip(
        questions, expected, answer(path, questions, scratch), strict=True
    ):
        scale = max(1.0, float(wanted.abs().max())) if wanted.is_floating_point() else 1.0
        off = _largest(found, wanted) if found.shape == wanted.shape else float("inf")
        if not off <= _TOLERANCE * scale:
            raise ModelError(
                f"the outputs of {path.name} differ from the model's (by {off:.2g}, batch of "
                f"{len(asked)}): does its forward branch on its data, or draw random numbers?"
            )
        largest = max(largest, off)
    return largest


def _largest(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference; of class numbers the share of those that differ."""
    if not wanted.is_floating_point():
        return float((found != wanted).double().mean())
    return float((found.to(wanted) - wanted).abs().max())


def samples_of(run: Run, names: Sequence[str]) -> tuple[Tensor, bool]:
    """Return inputs after the named transforms: the run's, or random ones without its data."""
    kept = {name: run.config.transforms.eval[name] for name in names}
    transforms = replace(run.config.transforms, eval=kept)
    loader_options = replace(run.config.loader, num_workers=0, eval_batch_size=_SAMPLES)
    config = replace(run.config, transforms=transforms, loader=loader_options)
    split = next((s for s in ("val", "test") if getattr(config.data, s) is not None), None)
    try:
        dataset = None if split is None else build_data(config, (split,)).sets[split]
        if dataset is not None:
            loader = eval_loader(config, dataset, Strategy(torch.device("cpu")))
            batch = next(iter(loader.epoch(0, 0, 1))).batch
            inputs = _one_view(inputs_of(batch))
            return inputs[torch.arange(_SAMPLES) % len(inputs)], True
    except DataError as error:
        logger.warning("the run's data are not there (%s): verified with random inputs", error)
    return _random(run, whole=len(kept) == len(run.config.transforms.eval)), False


def _random(run: Run, whole: bool) -> Tensor:
    form = run.facts.model_inputs
    if not form or "shape" not in form:
        raise ModelError(
            "the form of the model's inputs is not known, and the run's data are not there: "
            "put them back (data.root), or use format=safetensors"
        )
    shape = (_SAMPLES, *form["shape"][-3:])
    generator = torch.Generator().manual_seed(0)
    if not whole:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, dtype=getattr(torch, form["dtype"]), generator=generator)


def _one_view(batch: Any) -> Tensor:
    """Return one view of each sample: the caller averages over views."""
    if not isinstance(batch, Tensor):
        kind = type(batch).__name__
        raise ModelError(f"the model's input is a {kind}: only one tensor can be exported")
    return batch[:, 0] if batch.ndim == 5 else batch


def _write_weights(
    run: Run, name: str, folder: Path, preprocessing: Preprocessing, checkpoint: str
) -> tuple[str, dict[str, Any]]:
    """Write the weights and the configuration; a newly built model must load them."""
    weights: Mapping[str, Tensor] = run.model(checkpoint).state_dict()
    path = folder / "model.safetensors"
    facts: dict[str, Any] = {
        "format": name,
        "file": path.name,
        "model": run.facts.model,
        "transforms_of_the_caller": run.facts.transforms,
        "input": run.facts.model_inputs,
        "output": "logits",
        "classes": run.facts.classes,
        "provenance": provenance(run, checkpoint),
    }
    write_safetensors(path, weights, {"regimen": json.dumps(facts)})
    shutil.copyfile(run.path / "config.yaml", folder / "config.yaml")
    with no_initial_weights():
        bare = instantiate(run.facts.model, _key_="model")
    bare.load_state_dict(read_safetensors(path))
    equal = all(torch.equal(v, weights[k].cpu()) for k, v in bare.state_dict().items())
    if not equal:
        raise ModelError(f"{path.name}: a bare model does not hold the weights that were written")
    facts["verified"] = {"samples": "weights, bit for bit", "largest_difference": 0.0}
    return path.name, facts


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
