"""Write a run's model with 8-bit integers: smaller, and faster on a CPU."""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from data.errors import DataError
from trainer.build.data import build_pipeline
from trainer.errors import ModelError
from trainer.export.artefact import (
    BATCHES,
    complete,
    graph_facts,
    samples_of,
    verification,
)
from trainer.export.calibration import calibrated, learnt
from trainer.export.evaluation import metrics_of
from trainer.export.folder import export_folder
from trainer.export.formats import FORMATS, check_libraries, milliseconds, silently
from trainer.export.integers import integer_network
from trainer.export.loading import Answering
from trainer.export.network import Preprocessing, build_network
from trainer.inference.run import Run

logger = logging.getLogger("regimen")

Method = Literal["auto", "static", "dynamic"]
METHODS = ("auto", "static", "dynamic")
_NOISE = {"static": 0.02, "dynamic": 0.1}  # of the largest answer: root mean square of differences
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LATENCIES = (1, 32)  # batch sizes


@dataclass(frozen=True, slots=True)
class Quantized:
    """The written files, and size, speed and metrics before and after."""

    folder: Path
    file: Path
    method: str
    learnt: bool  # the run has learnt the ranges
    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Request:
    run: Run
    preprocessing: Preprocessing
    checkpoint: str
    samples: int  # for calibration
    folder: Path  # that is written


def quantize_run(
    run: Run,
    method: Method = "auto",
    out: Path | None = None,
    preprocessing: Preprocessing = "outside",
    checkpoint: str = "best",
    samples: int = 512,
    max_drop: float = 0.01,
    overwrite: bool = False,
) -> Quantized:
    """Write a run's model as ONNX with integers into the folder `out`.

    static: 8-bit weights and activations, with the ranges that the run has learnt, or those of
    `samples` training samples. dynamic: 8-bit weights of matrix products. auto: static where most
    weights are those of convolutions. out: default RUN/exports/quantized.

    Raises ModelError for a model that cannot be quantized, or a file whose outputs differ or which
    loses more than `max_drop` accuracy on the run's test data. Nothing incomplete is left.
    """
    check_libraries("onnx")
    if method == "auto":
        method = method_for(run.model(checkpoint))
    with export_folder(run, out, "quantized", overwrite) as (made, folder):
        request = _Request(run, preprocessing, checkpoint, samples, made)
        with tempfile.TemporaryDirectory(prefix="regimen-") as scratch:
            facts, before, after = _write(request, method, Path(scratch))
        _check_drop(before, after, max_drop)
        complete(run, made, facts)
    file = folder / facts["file"]
    own = facts["quantization"]["ranges"] == "learnt in training"
    return Quantized(folder, file, method, own, before, after)


def method_for(model: nn.Module) -> Method:
    """Return static for a network of convolutions, dynamic for one of matrix products."""
    total = sum(p.numel() for p in model.parameters())
    inside = [m for m in model.modules() if isinstance(m, _CONVOLUTIONS)]
    return "static" if 2 * sum(m.weight.numel() for m in inside) > total else "dynamic"


def _write(
    request: _Request, method: str, scratch: Path
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    run, form = request.run, FORMATS["onnx"]
    model, task = run.model(request.checkpoint), run.trainer(request.checkpoint).task
    pipeline = build_pipeline(run.config, "eval")
    network, outside = build_network(model, task, pipeline, request.preprocessing)
    samples, real = samples_of(run, outside)
    if not samples.is_floating_point() and request.preprocessing == "outside":
        raise ModelError(f"the model takes {samples.dtype}, not floats: it cannot be quantized")
    facts = graph_facts(
        run, "onnx", form.file, request.preprocessing, outside, samples, request.checkpoint
    )
    told: dict[str, Any] = {"method": method, "weights": "int8", "ranges": "of each batch"}
    facts["quantization"] = told
    whole, path = scratch / form.file, request.folder / form.file
    form.write(network.eval(), samples[:2].clone(), whole, facts)
    expected: nn.Module = network
    if method == "static":
        example = samples_of(run, list(pipeline.steps))[0][:2]
        ranges = learnt(run, model, request.checkpoint, example)
        told["ranges"] = "of training samples" if ranges is None else "learnt in training"
        if ranges is None:
            ranges = calibrated(run, model, request.checkpoint, request.samples)
            told["calibration_samples"] = request.samples
        told |= {"activations": "uint8", "layers": len(ranges.places.layers)}
        expected, _ = build_network(
            integer_network(model, ranges), task, pipeline, request.preprocessing
        )
        form.write(expected.eval(), samples[:2].clone(), path, facts)
    else:
        _write_dynamic(whole, path)
    difference = _compare(expected, path, samples, _NOISE[method])
    facts["verified"] = verification(real, difference)
    before, after = (_measured(request, p, facts, samples) for p in (whole, path))
    facts["before"], facts["after"] = before, after
    return facts, before, after


def _write_dynamic(source: Path, target: Path) -> None:
    onnx: Any = importlib.import_module("onnx")
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    plain = onnx.load(str(source))
    del plain.graph.value_info[:]  # shapes that the quantizer transposes some weights against
    with _quietly():
        quantization.quantize_dynamic(
            plain,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=quantization.QuantType.QInt8,
        )
    written = onnx.load(str(target))
    if not any(node.op_type.startswith("MatMulInteger") for node in written.graph.node):
        raise ModelError(
            "the model has no matrix product with weights that method=dynamic quantizes: "
            "method=static may do"
        )


def _compare(expected: nn.Module, path: Path, samples: Tensor, noise: float) -> float:
    """Return the largest difference of outputs. Raises ModelError if it exceeds rounding."""
    questions = [samples[:size].clone() for size in BATCHES]
    answer = FORMATS["onnx"].answer
    largest = 0.0
    with torch.inference_mode():
        for asked, found in zip(questions, answer(path, questions, path.parent), strict=True):
            wanted = expected(asked)
            if found.shape != wanted.shape:
                off, scale = torch.tensor([1e9]), 1.0
            elif wanted.is_floating_point():
                off, scale = (found - wanted).abs(), max(float(wanted.abs().max()), 1e-6)
            else:  # class numbers of pixels
                off, scale = (found != wanted).float(), 1.0
            root = float(off.square().mean().sqrt())
            if not root <= noise * scale:
                raise ModelError(
                    f"the outputs of the quantized model differ (by {root:.2g} of {scale:.2g}, "
                    f"batch of {len(asked)}): its values do not fit 8 bits; "
                    "callbacks=[default,qat] trains for them"
                )
            largest = max(largest, float(off.max()))
    return largest


def _measured(
    request: _Request, path: Path, facts: Mapping[str, Any], samples: Tensor
) -> dict[str, float]:
    """Return size, metrics and latency of a file."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def answer(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"input": x.contiguous().numpy()})[0])

    values = {"megabytes": path.stat().st_size / 1e6}
    values |= _metrics(request, Answering(answer, facts), facts)
    for size in _LATENCIES:
        batch = samples[torch.arange(size) % len(samples)]
        values[f"ms_of_{size}"] = milliseconds(answer, batch)
    return values


def _metrics(request: _Request, answering: nn.Module, facts: Mapping[str, Any]) -> dict[str, float]:
    data = request.run.config.data
    split = next((s for s in ("test", "val") if getattr(data, s) is not None), None)
    if split is None:
        return {}
    try:
        return metrics_of(request.run.config, answering, facts, split)
    except DataError as error:
        logger.warning("the run's data are not there (%s): accuracy is not measured", error)
        return {}


def _check_drop(before: Mapping[str, float], after: Mapping[str, float], most: float) -> None:
    for name, value in before.items():
        drop = value - after[name]
        if name.endswith("/accuracy") and not drop <= most:
            raise ModelError(
                f"{name} falls from {value:.4f} to {after[name]:.4f}, by more than "
                f"max_drop={most:g}: nothing is written; callbacks=[default,qat] trains for 8 bits"
            )


@contextmanager
def _quietly() -> Any:
    """Suppress what onnxruntime's quantizer logs to the root logger."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with silently():
            yield
    finally:
        root.setLevel(level)
