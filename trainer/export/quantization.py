"""Write a run's model with 8-bit integers: smaller, and faster on a CPU."""

import logging
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
from regimen.trainer.assembly.experiment import train_loader
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.errors import ModelError
from regimen.trainer.export.artefact import (
    export_run,
    largest_difference,
    metrics_of,
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
_RANGES = "fake_quantization"  # in the state of regimen.callbacks.compression.qat
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_STATIC = (*_PRODUCTS, "Relu", "MaxPool", "AveragePool", "GlobalAveragePool", "Add")
_INTEGERS = {"MatMulInteger", "QuantizeLinear"}
_WEIGHTED = {"MatMulInteger", "DequantizeLinear"}
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
            kind = graph.samples.dtype
            raise ModelError(f"the model takes {kind}, not floats: it cannot be quantized")
        whole, proto = path.with_name("float.onnx"), onnx_model(graph)
        learnt = _learnt(run, checkpoint, proto)
        save_onnx(proto, whole, {})
        told: Facts = {"method": method, "weights": "uint8", "ranges": "of each batch"}
        given = None
        if method == "static":
            told |= {"activations": "uint8", "calibration_samples": samples}
            told["ranges"] = LEARNT if learnt else "of training samples"
            given = calibration(run.config, facts["transforms_of_the_caller"], samples)
        facts["quantization"] = told
        save_onnx(integer_model(whole, path, given, learnt), path, facts)
        difference = largest_difference(graph, GRAPHS["onnx"].load(path), quantized=True)
        facts["verified"]["largest_difference"] = difference
        before = facts["before"] = _measured(run, whole, graph, split)
        after = facts["after"] = _measured(run, path, graph, split)
        whole.unlink()
        for name, value in before.items():
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
    """Return static for a network of convolutions, dynamic for one of matrix products."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    inside = sum(m.weight.numel() for m in model.modules() if isinstance(m, kinds))
    return "static" if 2 * inside > sum(p.numel() for p in model.parameters()) else "dynamic"


def integer_model(
    whole: Path,
    path: Path,
    samples: Iterator[dict[str, Any]] | None,
    ranges: Mapping[str, Any],
) -> Any:
    """Return a model of ONNX with 8-bit weights: of matrix products, or with activations, too.

    path: where to make it. samples: batches of inputs, for the calibration of activations; ranges:
    those of tensors that are known, each a pair of numpy's numbers. Raises ModelError where nothing
    was quantized.
    """
    import onnx
    from onnxruntime import quantization as library

    signed, unsigned = library.QuantType.QInt8, library.QuantType.QUInt8
    with silently():
        if samples is None:
            method, other = "dynamic", "static"
            library.quantize_dynamic(
                whole, path, op_types_to_quantize=["MatMul", "Gemm"], weight_type=signed
            )
        else:
            method, other = "static", "dynamic"
            known = {
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
                extra_options={"TensorQuantOverrides": known},
            )
    proto = onnx.load(str(path))
    if _INTEGERS.isdisjoint(node.op_type for node in proto.graph.node):
        raise ModelError(
            f"the model has no layer with weights that method={method} quantizes: "
            f"method={other} may do"
        )
    # Signed weights are wrong on a CPU with AVX2 and no VNNI: sums of two products saturate there.
    given = {i for n in proto.graph.node if n.op_type in _WEIGHTED for i in n.input}
    for tensor in proto.graph.initializer:
        if tensor.name in given and tensor.data_type == onnx.TensorProto.INT8:
            values = onnx.numpy_helper.to_array(tensor).view("uint8") ^ 128  # 0 becomes 128
            kind, content = onnx.TensorProto.UINT8, values.tobytes()
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, kind, tensor.dims, content, True))
    return proto


def _learnt(run: Run, checkpoint: str, proto: Any) -> dict[str, Any]:
    """Return the ranges that a run has learnt, by the tensors that its layers are given."""
    states = read_checkpoint(find_checkpoint(run.path, checkpoint))["callbacks"].values()
    state = next((s[_RANGES] for s in states if isinstance(s, Mapping) and _RANGES in s), None)
    if state is None or not state["known"]:
        return {}
    ends = torch.stack([state["low"], state["high"]], 1).float().numpy()
    layers = dict(zip(state["layers"], ends, strict=True))
    found = {}
    made_by = {node.output[0]: node for node in proto.graph.node}
    for node in proto.graph.node:
        if node.op_type not in _PRODUCTS:
            continue
        scopes = [e.value for e in node.metadata_props if e.key.endswith("name_scopes")]
        places = re.findall("'(.*?)'", " ".join(scopes))
        for name in (*places, node.input[1].removesuffix(".weight")):
            known, tensor = layers.get(name.removeprefix("model.")), node.input[0]
            while known is not None:
                found[tensor] = known
                before = made_by.get(tensor)  # pooling keeps the range of what it is given
                if before is None or before.op_type not in ("MaxPool", "Reshape", "Flatten"):
                    break
                tensor = before.input[0]
    return found


def calibration(config: Config, names: Iterable[str], samples: int) -> Iterator[dict[str, Any]]:
    """Yield training samples, in batches, with the named transforms of evaluation.

    These are the first samples of the run's first epoch: the same in each call. Raises ModelError
    without the training data.
    """
    config = with_transforms(config, names)
    as_it_is: Any = {"sampler": None, "batch_sampler": None, "shuffle": True, "drop_last": False}
    config = replace(
        config,
        transforms=replace(config.transforms, train=config.transforms.eval, device={}),
        loader=replace(config.loader, batch_size=_BATCH, num_workers=0, **as_it_is),
        trainer=replace(config.trainer, gradient_accumulation_steps=1, overfit_batches=None),
    )
    try:
        found = train_loader(config, build_data(config, ("train",)), Strategy("cpu"))
        for micro in found.epoch(0, 0, min(len(found), -(-samples // _BATCH))):
            yield {"input": one_view(micro.batch).numpy()}
        found.close()
    except DataError as error:
        raise ModelError(
            f"method=static needs training samples, and the run's data are not there ({error}): "
            "put them back (data.root), or use method=dynamic"
        ) from error


def _measured(run: Run, path: Path, graph: Exportable, split: str | None) -> dict[str, float]:
    """Return size, metrics and latency of a file."""
    answer, values = GRAPHS["onnx"].load(path), {"megabytes": path.stat().st_size / 1e6}
    config = run.config
    if split is not None or config.data.test is not None or config.data.val is not None:
        try:
            values |= metrics_of(config, answer, graph.facts, split, run.facts.classes)[1]
        except DataError as error:
            logger.warning("the run's data are not there (%s): accuracy is not measured", error)
    for size in (1, _BATCH):
        with torch.inference_mode():
            times = timeit.repeat(partial(answer, graph.samples[:size]), number=1, repeat=23)
        values[f"ms_of_{size}"] = 1e3 * median(times[3:])  # the first are for warm-up
    return values
