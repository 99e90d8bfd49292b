"""Write a run's model with 8-bit integers: smaller, and faster on a CPU."""

import logging
import math
import re
import timeit
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from regimen.conf.schema import Config
from regimen.data.errors import DataError
from regimen.trainer.assembly.data import build_data
from regimen.trainer.assembly.loaders import train_loader
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.errors import ModelError
from regimen.trainer.export.artefact import (
    export_run,
    largest_difference,
    metrics_of,
    one_tensor,
    one_view,
    with_transforms,
)
from regimen.trainer.export.formats import (
    GRAPHS,
    Exportable,
    Facts,
    Preprocessing,
    check_libraries,
    onnx_model,
    save_onnx,
    silently,
)
from regimen.trainer.inference.run import Run, find_checkpoint
from regimen.trainer.strategies.strategy import Strategy

logger = logging.getLogger("regimen")

Method = Literal["auto", "static", "dynamic"]
LEARNT = "learnt in training"
_QAT_STATE = "fake_quantization"  # key in the state of regimen.callbacks.compression.qat
# Operators of ONNX:
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_STATIC = (*_PRODUCTS, "Relu", "MaxPool", "AveragePool", "GlobalAveragePool", "Add")
_INTEGERS = {"MatMulInteger", "QuantizeLinear"}  # one of these is in every quantized model
_WEIGHTED = {"MatMulInteger", "DequantizeLinear"}  # take quantized weights as an input
_KEEP_RANGE = ("MaxPool", "Reshape", "Flatten")  # return values of their input
_BATCH = 32


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
) -> tuple[Path, Facts]:
    """Write a run's model as ONNX with integers into the folder `out`.

    static: 8-bit weights and activations, with the ranges that the run has learnt, or those of
    `samples` training samples. dynamic: 8-bit weights of matrix products. auto: static where most
    weights are those of convolutions. out: default RUN/exports/quantized. split: where accuracy is
    measured, by default the test data, or else those of validation.

    Returns the file and its facts; `quantization` among them says how, `before` and `after` give
    size, speed and metrics. Raises ModelError for a model that cannot be quantized, or a file whose
    outputs differ or which loses more than `max_drop` accuracy. Nothing incomplete is left.
    """

    def write(graph: Exportable, path: Path) -> None:
        facts = graph.facts
        if not graph.samples.is_floating_point() and preprocessing == "outside":
            raise ModelError(
                f"the model takes {graph.samples.dtype}, not floats: it cannot be quantized"
            )
        proto = onnx_model(graph)
        ranges = _learnt(run, checkpoint, proto)  # reads metadata that `save_onnx` removes
        whole = path.with_name("float.onnx")
        save_onnx(proto, whole, {})

        batches = None
        about: Facts = {"method": method, "weights": "uint8", "ranges": "of each batch"}
        if method == "static":
            about["ranges"] = LEARNT if ranges else "of training samples"
            about["activations"] = "uint8"
            about["calibration_samples"] = samples
            names = facts["transforms_of_the_caller"]
            batches = calibration(run.config, names, samples, graph.samples.ndim)
        facts["quantization"] = about
        save_onnx(integer_model(whole, path, batches, ranges), path, facts)
        difference = largest_difference(graph, GRAPHS["onnx"].load(path), quantized=True)
        facts["verified"]["largest_difference"] = difference

        before = _measured(run, whole, graph, split)
        after = _measured(run, path, graph, split)
        facts["before"] = before
        facts["after"] = after
        whole.unlink()
        for name, value in before.items():
            # Negated: NaN counts as a loss.
            if name.endswith("/accuracy") and not value - after[name] <= max_drop:
                raise ModelError(
                    f"{name} falls from {value:.4f} to {after[name]:.4f}, by more than "
                    f"max_drop={max_drop:g}: nothing is written; callbacks=[default,qat] trains "
                    "for 8 bits"
                )

    check_libraries("onnx")
    if method == "auto":
        method = method_for(run.model(checkpoint))
    return export_run(run, "onnx", out, preprocessing, checkpoint, overwrite, write)


def method_for(model: nn.Module) -> Method:
    """Return static if most weights are those of convolutions, else dynamic."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    convolutions = sum(m.weight.numel() for m in model.modules() if isinstance(m, kinds))
    total = sum(p.numel() for p in model.parameters())
    return "static" if 2 * convolutions > total else "dynamic"


def integer_model(
    whole: Path,
    path: Path,
    samples: Iterator[dict[str, Any]] | None,
    ranges: Mapping[str, Any],
) -> Any:
    """Return the ONNX model of the file `whole` with 8-bit weights.

    path: a file that it is made in.
    samples: batches of inputs that calibrate activations, which then have 8 bits too; None: only
    the weights of matrix products. ranges: the (lowest, highest) value, numpy's numbers, of the
    tensors that need no calibration. Raises ModelError if nothing was quantized.
    """
    import onnx
    from onnxruntime import quantization as library

    signed = library.QuantType.QInt8
    unsigned = library.QuantType.QUInt8
    with silently():
        if samples is None:
            library.quantize_dynamic(
                whole, path, op_types_to_quantize=["MatMul", "Gemm"], weight_type=signed
            )
        else:
            overrides = {
                name: [{"rmin": low, "rmax": high, "quant_type": unsigned}]
                for name, (low, high) in ranges.items()
            }
            library.quantize_static(
                whole,
                path,
                SimpleNamespace(get_next=partial(next, samples, None)),
                quant_format=library.QuantFormat.QDQ,
                op_types_to_quantize=list(_STATIC),
                per_channel=True,
                activation_type=unsigned,
                weight_type=signed,
                extra_options={"TensorQuantOverrides": overrides},
            )
    proto = onnx.load(str(path))
    if _INTEGERS.isdisjoint(node.op_type for node in proto.graph.node):
        method, other = ("dynamic", "static") if samples is None else ("static", "dynamic")
        raise ModelError(
            f"the model has no layer with weights that method={method} quantizes: "
            f"method={other} may do"
        )
    # Signed weights are wrong on a CPU with AVX2 and no VNNI: sums of two products saturate there.
    # They become unsigned by an offset of 128: 0 becomes 128.
    inputs = {i for node in proto.graph.node if node.op_type in _WEIGHTED for i in node.input}
    for tensor in proto.graph.initializer:
        if tensor.name not in inputs or tensor.data_type != onnx.TensorProto.INT8:
            continue
        values = onnx.numpy_helper.to_array(tensor).view("uint8") ^ 128
        replacement = onnx.helper.make_tensor(
            tensor.name, onnx.TensorProto.UINT8, tensor.dims, values.tobytes(), raw=True
        )
        tensor.CopyFrom(replacement)
    return proto


def _learnt(run: Run, checkpoint: str, proto: Any) -> dict[str, Any]:
    """Return the ranges that a run has learnt for the inputs of its layers, by tensor name."""
    callbacks = read_checkpoint(find_checkpoint(run.path, checkpoint))["callbacks"]
    states = [s for s in callbacks.values() if isinstance(s, Mapping) and _QAT_STATE in s]
    if not states or not states[0][_QAT_STATE]["known"]:
        return {}
    state = states[0][_QAT_STATE]
    ends = torch.stack([state["low"], state["high"]], 1).float().numpy()
    range_of_layer = dict(zip(state["layers"], ends, strict=True))

    ranges: dict[str, Any] = {}
    made_by = {node.output[0]: node for node in proto.graph.node}
    for node in proto.graph.node:
        if node.op_type not in _PRODUCTS:
            continue
        # The name of the layer: from the exporter's notes, or from that of its weight.
        scopes = [e.value for e in node.metadata_props if e.key.endswith("name_scopes")]
        layers = re.findall("'(.*?)'", " ".join(scopes))
        layers.append(node.input[1].removesuffix(".weight"))
        for name in layers:
            learnt = range_of_layer.get(name.removeprefix("model."))
            if learnt is not None:
                _set_range(ranges, node.input[0], learnt, made_by)
    return ranges


def _set_range(
    ranges: dict[str, Any], tensor: str, learnt: Any, made_by: Mapping[str, Any]
) -> None:
    """Set a tensor's range, and that of the tensors which it is only pooled or reshaped from."""
    ranges[tensor] = learnt
    while tensor in made_by and made_by[tensor].op_type in _KEEP_RANGE:
        tensor = made_by[tensor].input[0]
        ranges[tensor] = learnt


def calibration(
    config: Config, names: Iterable[str], samples: int, dimensions: int = 4
) -> Iterator[dict[str, Any]]:
    """Yield training samples, in batches, with the named transforms of evaluation.

    dimensions: of a batch of the model's inputs, which is one view of each sample. These are the
    first samples of the run's first epoch: the same in each call. Raises ModelError without the
    training data.
    """
    config = with_transforms(config, names)
    loader = replace(
        config.loader,
        batch_size=_BATCH,
        num_workers=0,
        sampler=None,
        batch_sampler=None,
        shuffle=True,
        drop_last=False,
    )
    config = replace(
        config,
        transforms=replace(config.transforms, train=config.transforms.eval, device={}),
        loader=loader,
        trainer=replace(config.trainer, gradient_accumulation_steps=1, overfit_batches=None),
    )
    try:
        batches = train_loader(config, build_data(config, ("train",)), Strategy("cpu"))
        count = min(len(batches), math.ceil(samples / _BATCH))
        for micro in batches.epoch(0, 0, count):
            yield {"input": one_view(one_tensor(micro.batch), dimensions).numpy()}
        batches.close()
    except DataError as error:
        raise ModelError(
            f"method=static needs training samples, and the run's data are not there ({error}): "
            "put them back (data.root), or use method=dynamic"
        ) from error


def _measured(run: Run, path: Path, graph: Exportable, split: str | None) -> dict[str, float]:
    """Return the size of a file (MB), its metrics, and its latency (ms) for two batch sizes."""
    answer = GRAPHS["onnx"].load(path)
    values = {"megabytes": path.stat().st_size / 1e6}
    config = run.config
    if split is not None or config.data.test is not None or config.data.val is not None:
        try:
            values |= metrics_of(config, answer, graph.facts, split, run.facts.classes)[1]
        except DataError as error:
            logger.warning("the run's data are not there (%s): accuracy is not measured", error)
    for size in (1, _BATCH):
        with torch.inference_mode():
            times = timeit.repeat(partial(answer, graph.samples[:size]), number=1, repeat=23)
        values[f"ms_of_{size}"] = 1e3 * median(times[3:])  # the first three warm up
    return values
