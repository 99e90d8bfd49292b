"""The network that is exported, and each format: how it is written, and how it is loaded again."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from data.transforms import Pipeline, Standardize, ToFloat
from trainer.errors import ModelError
from trainer.inference.predictor import OUTPUT, named_tensors
from trainer.task import Task

Preprocessing = Literal["outside", "inside"]
Answer = Callable[[Tensor], Any]  # from a batch of inputs to a tensor, or several by name
_LOST: Any = torch.jit.TracerWarning  # type: ignore[attr-defined] # Python that a trace forgets
_COMPILERS = ("g++", "clang++", "c++")


class Normalize(nn.Module):
    """The transforms that are part of a graph: bytes to floats from 0 to 1, then standardized."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        x = x if x.is_floating_point() else x.to(torch.float32) / 255
        return (x - self.mean) / self.std


class Network(nn.Module):
    """A model as its task calls it.

    inside: the transforms that are part of the graph, whose outputs the task then interprets; None:
    neither, so floats in and outputs (logits) out.
    """

    def __init__(self, model: nn.Module, task: Task, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.model = model
        self.task = task
        self.eval()

    def forward(self, x: Tensor) -> Any:
        """Map a batch of inputs to a tensor, or to tensors by name."""
        output = self.task.prediction_step(self.model, x if self.inside is None else self.inside(x))
        named = named_tensors(output if self.inside is None else self.task.interpret(output))
        return named.get(OUTPUT, named)


def build_network(
    model: nn.Module, task: Task, pipeline: Pipeline, preprocessing: Preprocessing
) -> tuple[Network, list[str]]:
    """Return the network to export, and the names of the transforms that callers must apply.

    With `inside` it has the transforms after the last one that changes sizes. Raises ModelError for
    one of them that cannot be part of a graph.
    """
    names = list(pipeline.steps)
    if preprocessing == "outside":
        return Network(model, task), names
    inside: list[nn.Module] = []
    while names and isinstance(step := pipeline.steps[names[-1]], ToFloat | Standardize):
        names.pop()
        like = torch.zeros(1)
        if isinstance(step, ToFloat):
            inside.insert(0, Normalize(like, like + 1))
            return Network(model, task, nn.Sequential(*inside)), names
        mean, std = step.mean.beside(like).clone(), step.std.beside(like).clone()
        inside.insert(0, Normalize(mean, std))
    last = f"transforms.eval.{names[-1]}" if names else "transforms.eval"
    raise ModelError(
        f"{last} cannot be part of a graph that takes bytes: only data.transforms.ToFloat and "
        "Standardize at the end of the transforms can; use preprocessing=outside"
    )


@dataclass(frozen=True, slots=True)
class Exportable:
    """What is written as a graph: the network, samples of its inputs, and the facts about both."""

    network: Network
    samples: Tensor
    facts: dict[str, Any]

    @property
    def example(self) -> Tensor:
        """The inputs that it is traced with."""
        return self.samples[:2].clone()

    @property
    def metadata(self) -> dict[str, str]:
        """The facts as a file of torch's that is added."""
        return {"regimen.json": json.dumps(self.facts)}


@dataclass(frozen=True, slots=True)
class Format:
    """One format: how a graph is written, with its facts, and loaded again."""

    file: str
    write: Callable[[Exportable, Path], None]
    load: Callable[[Path], Answer]
    line: str  # of Python, that loads the file as `network`
    needs: tuple[str, ...] = ()  # libraries of the extra `onnx`
    remark: str = ""
    compiles: bool = False  # with the machine's C++ compiler
    runs_code: bool = True  # when it is loaded


def check_libraries(name: str) -> None:
    """Refuse a format whose libraries or compiler are not installed. Raises ModelError."""
    form = GRAPHS[name]
    for library in form.needs:
        if importlib.util.find_spec(library) is None:
            raise ModelError(f"format={name} needs {library}: pip install -e '.[onnx]'")
    if form.compiles and not any(map(shutil.which, _COMPILERS)):
        raise ModelError(
            f"format={name} needs a C++ compiler, and none of {', '.join(_COMPILERS)} is in PATH: "
            "install one (apt install g++), or use format=torch_export"
        )


@contextmanager
def silently() -> Iterator[None]:
    """Suppress the exporters' and the quantizer's output about their passes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def exported_program(graph: Exportable) -> ExportedProgram:
    """Export with a free batch size. Raises ModelError."""
    try:
        return torch.export.export(
            graph.network,
            (graph.example,),
            dynamic_shapes=({0: Dim("batch", min=1)},),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    except Exception as error:
        raise ModelError(
            f"the model cannot be exported by torch.export: {one_line(error)}; "
            "format=torchscript or format=safetensors may do"
        ) from error


def one_line(error: Exception) -> str:
    """Return what an error of a library says, as one line that is not too long."""
    return " ".join(str(error).split())[:300]


def onnx_model(graph: Exportable) -> Any:
    """Return a graph as ONNX's protocol buffer; outputs have their names, the batch its own."""
    with torch.no_grad():
        names = list(named_tensors(graph.network(graph.example)))
    with silently():
        exported = exported_program(graph)
        options: Any = {"input_names": ["input"], "output_names": names, "verbose": False}
        program = torch.onnx.export(exported, **options)
    assert program is not None
    proto = program.model_proto
    del proto.graph.value_info[:]  # with the exporter's name of the batch, and hints at runtime
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return proto


def save_onnx(proto: Any, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a protocol buffer with metadata, without the exporter's notes: half of a small file."""
    for part in (*proto.graph.node, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]
        part.doc_string = ""
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(proto.SerializeToString())


def _load_onnx(path: Path) -> Answer:
    check_libraries("onnx")
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answer(x: Tensor) -> Any:
        found = map(torch.from_numpy, session.run(None, {"input": x.contiguous().numpy()}))
        named = dict(zip(names, found, strict=True))
        return named.get(OUTPUT, named)

    return answer


def _write_program(graph: Exportable, path: Path) -> None:
    with silently():
        torch.export.save(exported_program(graph), path, extra_files=graph.metadata)


def _write_torchscript(graph: Exportable, path: Path) -> None:
    """Trace a network; its model is compiled from source where a trace may lose a branch."""
    network, trace = graph.network, partial(torch.jit.trace, strict=False)
    with silently():  # the deprecation is mentioned once, in `remark`
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", _LOST)
            traced = trace(network, (graph.example,))
        if any(issubclass(w.category, _LOST) for w in told):
            # Of Python that TorchScript does not know, the trace may do: it is verified.
            with suppress(Exception):
                model = torch.jit.script(network.model)
                traced = trace(Network(model, network.task, network.inside), (graph.example,))
        torch.jit.save(traced, str(path), _extra_files=graph.metadata)


def _load_torchscript(path: Path) -> Answer:
    return torch.jit.load(str(path))  # type: ignore[no-any-return, no-untyped-call]


def _write_package(graph: Exportable, path: Path) -> None:
    inductor: Any = importlib.import_module("torch._inductor")
    metadata = {"aot_inductor.metadata": {"regimen": json.dumps(graph.facts)}}
    program = exported_program(graph)
    try:
        with silently(), torch.inference_mode():
            inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=metadata
            )
    except Exception as error:
        raise ModelError(
            f"the model cannot be compiled: {one_line(error)}; format=torch_export may do"
        ) from error


def _load_package(path: Path) -> Answer:
    inductor: Any = importlib.import_module("torch._inductor")
    package = inductor.aoti_load_package(str(path))
    return lambda x: package(x.contiguous())


GRAPHS: Mapping[str, Format] = {
    "onnx": Format(
        "model.onnx",
        lambda graph, path: save_onnx(onnx_model(graph), path, graph.facts),
        _load_onnx,
        "import onnxruntime; network = onnxruntime.InferenceSession({path!r})",
        ("onnx", "onnxscript", "onnxruntime"),
        runs_code=False,
    ),
    "torch_export": Format(
        "model.pt2",
        _write_program,
        lambda path: torch.export.load(path).module(),
        "import torch; network = torch.export.load({path!r}).module()",
    ),
    "torchscript": Format(
        "model.ts",
        _write_torchscript,
        _load_torchscript,
        "import torch; network = torch.jit.load({path!r})",
        remark="TorchScript is deprecated in torch; onnx and torch_export are its successors",
    ),
    "aoti": Format(
        "model.pt2",
        _write_package,
        _load_package,
        "import torch; network = torch._inductor.aoti_load_package({path!r})",
        compiles=True,
        remark="the package is machine code for this kind of CPU and this version of torch; C++ "
        "programs set AOTI_RUNTIME_CHECK_INPUTS=1, or a wrong size reads out of bounds",
    ),
}
