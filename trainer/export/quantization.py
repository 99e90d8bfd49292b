"""Write a run's model with 8-bit integers: smaller, and faster on a CPU."""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from conf.schema import Config
from data.batch import inputs_of
from data.errors import DataError
from trainer.assembly.data import build_data
from trainer.assembly.loaders import train_loader
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import ModelError
from trainer.export.artefact import (
    Exportable,
    complete,
    export_folder,
    graph_of,
    largest_difference,
    milliseconds,
)
from trainer.export.evaluation import Answering, metrics_of
from trainer.export.fake_quantization import LAYERS, LEARNT
from trainer.export.formats import (
    FORMATS,
    Preprocessing,
    check_libraries,
    onnx_model,
    save_onnx,
    silently,
)
from trainer.inference.run import Run, find_checkpoint
from trainer.strategies.strategy import Strategy

logger = logging.getLogger("regimen")

Method = Literal["auto", "static", "dynamic"]
_NOISE = 0.1  # of the largest answer: root mean square of the differences that rounding makes
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_STATIC = (*_PRODUCTS, "Relu", "MaxPool", "AveragePool", "GlobalAveragePool", "Add")
_BATCH = 32


@dataclass(frozen=True, slots=True)
class Quantized:
    """The written files, and size, speed and metrics before and after."""

    folder: Path
    file: Path
    method: str
    learnt: bool  # the run has learnt the ranges
    before: Mapping[str, float]
    after: Mapping[str, float]


def quantize_run(
    run: Run,
    method: Method = "auto",
    out: Path | None = None,
    preprocessing: Preprocessing = "outside",
    checkpoint: str = "best",
    samples: int = 512,
    max_drop: float = 0.01,
    split: str | None = None,
    overwrite: bool = False,
) -> Quantized:
    """Write a run's model as ONNX with integers into the folder `out`.

    static: 8-bit weights and activations, with the ranges that the run has learnt, or those of
    `samples` training samples. dynamic: 8-bit weights of matrix products. auto: static where most
    weights are those of convolutions. out: default RUN/exports/quantized. split: where accuracy is
    measured, by default the test data, or else those of validation.

    Raises ModelError for a model that cannot be quantized, or a file whose outputs differ or which
    loses more than `max_drop` accuracy. Nothing incomplete is left.
    """
    check_libraries("onnx")
    if method == "auto":
        method = method_for(run.model(checkpoint))
    with export_folder(run, out, "quantized", overwrite) as (made, folder):
        graph = graph_of(run, "onnx", preprocessing, checkpoint)
        facts, path = graph.facts, made / graph.facts["file"]
        if not graph.samples.is_floating_point() and preprocessing == "outside":
            kind = graph.samples.dtype
            raise ModelError(f"the model takes {kind}, not floats: it cannot be quantized")
        told: dict[str, Any] = {"method": method, "weights": "int8"}
        with tempfile.TemporaryDirectory(prefix="regimen-") as scratch:
            whole = Path(scratch) / path.name
            proto = onnx_model(graph.network, graph.samples[:2].clone())
            learnt = _learnt(run, checkpoint, proto)
            save_onnx(proto, whole, {})
            if method == "static":
                told |= {"activations": "uint8", "calibration_samples": samples}
                told["ranges"] = "learnt in training" if learnt else "of training samples"
                outside = list(facts["transforms_of_the_caller"])
                write_static(whole, path, _Reader(run.config, outside, samples), learnt)
            else:
                told["ranges"] = "of each batch"
                write_dynamic(whole, path)
            facts["quantization"] = told
            save_onnx(importlib.import_module("onnx").load(str(path)), path, facts)
            answer = FORMATS["onnx"].load(path, facts)
            difference = largest_difference(graph, path, answer, _NOISE, 1e-6, squared=True)
            facts["verified"]["largest_difference"] = difference
            facts["before"] = _measured(run, whole, graph, split)
            facts["after"] = _measured(run, path, graph, split)
        check_drop(facts["before"], facts["after"], max_drop)
        complete(run, made, folder, facts)
    own = told["ranges"] == "learnt in training"
    file = folder / facts["file"]
    return Quantized(folder, file, method, own, facts["before"], facts["after"])


def method_for(model: nn.Module) -> Method:
    """Return static for a network of convolutions, dynamic for one of matrix products."""
    total = sum(p.numel() for p in model.parameters())
    inside = [m for m in model.modules() if isinstance(m, LAYERS[:3])]
    return "static" if 2 * sum(m.weight.numel() for m in inside) > total else "dynamic"  # type: ignore[operator,misc]


def write_static(whole: Path, path: Path, samples: Any, ranges: Mapping[str, Any]) -> None:
    """Write a model of ONNX with 8-bit weights and activations.

    samples: a CalibrationDataReader of onnxruntime's kind; ranges: those of tensors that are known,
    each a pair of numpy's numbers.
    """
    library: Any = importlib.import_module("onnxruntime.quantization")
    known = {
        name: [{"rmin": low, "rmax": high, "quant_type": library.QuantType.QUInt8}]
        for name, (low, high) in ranges.items()
    }
    with silently():
        library.quantize_static(
            whole,
            path,
            samples,
            quant_format=library.QuantFormat.QDQ,
            op_types_to_quantize=list(_STATIC),
            per_channel=True,
            activation_type=library.QuantType.QUInt8,
            weight_type=library.QuantType.QInt8,
            extra_options={"TensorQuantOverrides": known},
        )
    _refuse_floats(path, "QuantizeLinear", "static", "dynamic")


def write_dynamic(whole: Path, path: Path) -> None:
    """Write a model of ONNX with 8-bit weights of matrix products."""
    library: Any = importlib.import_module("onnxruntime.quantization")
    with silently():
        library.quantize_dynamic(
            whole,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=library.QuantType.QInt8,
        )
    _refuse_floats(path, "MatMulInteger", "dynamic", "static")


def _refuse_floats(path: Path, integer: str, method: str, other: str) -> None:
    """Raise ModelError for a file in which nothing was quantized."""
    nodes = importlib.import_module("onnx").load(str(path)).graph.node
    if not any(node.op_type.startswith(integer) for node in nodes):
        raise ModelError(
            f"the model has no layer with weights that method={method} quantizes: "
            f"method={other} may do"
        )


def _learnt(run: Run, checkpoint: str, proto: Any) -> dict[str, Any]:
    """Return the ranges that a run has learnt, by the tensors that its layers are given."""
    path = find_checkpoint(run.path, checkpoint)
    states = CheckpointStore(path.parent).load(path)["callbacks"].values()
    state = next((s[LEARNT] for s in states if isinstance(s, Mapping) and LEARNT in s), None)
    if state is None or not state["known"]:
        return {}
    ends = torch.stack([state["low"], state["high"]], 1).float().numpy()
    layers = dict(zip(state["layers"], ends, strict=True))
    found: dict[str, Any] = {}
    made_by = {node.output[0]: node for node in proto.graph.node}
    for node in proto.graph.node:
        if node.op_type in _PRODUCTS:
            scopes = {e.value for e in node.metadata_props if e.key.endswith("name_scopes")}
            places = {node.input[1].removesuffix(".weight")} | {
                scope.strip("' ") for text in scopes for scope in text.strip("[]").split(",")
            }
            for name in places:
                if (known := layers.get(name.removeprefix("model."))) is not None:
                    found |= dict.fromkeys(_shared(node.input[0], made_by), known)
    return found


def _shared(name: str, made_by: Mapping[str, Any]) -> list[str]:
    """Return the tensors that have the range of one: pooling keeps that of what it is given."""
    node = made_by.get(name)
    if node is None or node.op_type not in ("MaxPool", "Reshape", "Flatten"):
        return [name]
    return [name, *_shared(node.input[0], made_by)]


class _Reader:
    """Training samples, batch by batch, as onnxruntime's calibration asks for them.

    These are the first samples of the run's first epoch, with the transforms of evaluation that are
    not part of the graph: the same in each call. Raises ModelError without the training data.
    """

    def __init__(self, config: Config, names: Sequence[str], samples: int) -> None:
        self._batches = _training_batches(config, names, samples)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch; None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch.numpy()}


def _training_batches(config: Config, names: Sequence[str], samples: int) -> Iterator[Any]:
    steps = {name: config.transforms.eval[name] for name in names}
    transforms = replace(config.transforms, train=steps, device={})
    loader = replace(
        config.loader,
        batch_size=_BATCH,
        num_workers=0,
        sampler=None,
        batch_sampler=None,
        shuffle=True,
        drop_last=False,
    )
    options = replace(config.trainer, gradient_accumulation_steps=1, overfit_batches=None)
    config = replace(config, transforms=transforms, loader=loader, trainer=options)
    try:
        found = train_loader(config, build_data(config, ("train",)), Strategy(torch.device("cpu")))
        for micro in found.epoch(0, 0, min(len(found), -(-samples // _BATCH))):
            inputs = inputs_of(micro.batch)
            yield inputs[:, 0] if inputs.ndim == 5 else inputs
        found.close()
    except DataError as error:
        raise ModelError(
            f"method=static needs training samples, and the run's data are not there ({error}): "
            "put them back (data.root), or use method=dynamic"
        ) from error


def _measured(run: Run, path: Path, graph: Exportable, split: str | None) -> dict[str, float]:
    """Return size, metrics and latency of a file."""
    answer = FORMATS["onnx"].load(path, graph.facts)
    values = {"megabytes": path.stat().st_size / 1e6}
    values |= _metrics(run.config, Answering(answer, graph.facts), graph.facts, split)
    for size in (1, _BATCH):
        batch = graph.samples[torch.arange(size) % len(graph.samples)]
        values[f"ms_of_{size}"] = milliseconds(answer, batch)
    return values


def _metrics(
    config: Config, answering: nn.Module, facts: Mapping[str, Any], split: str | None
) -> dict[str, float]:
    if split is None and config.data.test is None and config.data.val is None:
        return {}
    try:
        return metrics_of(config, answering, facts, split)[1]
    except DataError as error:
        logger.warning("the run's data are not there (%s): accuracy is not measured", error)
        return {}


def check_drop(before: Mapping[str, float], after: Mapping[str, float], most: float) -> None:
    """Raise ModelError where more accuracy is lost than `most`."""
    for name, value in before.items():
        if name.endswith("/accuracy") and not value - after[name] <= most:
            raise ModelError(
                f"{name} falls from {value:.4f} to {after[name]:.4f}, by more than "
                f"max_drop={most:g}: nothing is written; callbacks=[default,qat] trains for 8 bits"
            )
