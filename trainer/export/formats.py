"""The network that is exported, and each format: how it is written, and how it is loaded again."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export, save

from data.transforms import Pipeline, Standardize, ToFloat
from models.pretrained import no_initial_weights
from trainer.checkpoints.archive import read_safetensors
from trainer.errors import ModelError
from trainer.inference.predictor import OUTPUT, named_tensors
from trainer.targets.instantiate import instantiate
from trainer.task import Task

Preprocessing = Literal["outside", "inside"]
Answer = Callable[[Tensor], Any]  # from a batch of inputs to a tensor, or several by name
WEIGHTS = "safetensors"
_LOST: Any = torch.jit.TracerWarning  # type: ignore[attr-defined] # Python that a trace forgets
_COMPILERS = ("g++", "clang++", "c++")


class Normalize(nn.Module):
    """The transforms that are part of a graph: bytes to floats from 0 to 1, then standardized."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1) if mean is None else mean)
        self.register_buffer("std", torch.ones(1) if std is None else std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        x = x if x.is_floating_point() else x.to(torch.float32) / 255
        return (x - self.mean) / self.std


class Network(nn.Module):
    """A model as its task calls it, after `steps` and, if asked for, before `interpret`."""

    def __init__(self, model: nn.Module, task: Task, steps: nn.Module, interprets: bool) -> None:
        super().__init__()
        self.steps = steps
        self.model = model
        self.task = task
        self.interprets = interprets

    def forward(self, x: Tensor) -> Any:
        """Map a batch of inputs to outputs (logits), or to their interpretation by the task.

        Outputs that are no single tensor are tensors by name.
        """
        output = self.task.prediction_step(self.model, self.steps(x))
        named = named_tensors(self.task.interpret(output) if self.interprets else output)
        return named.get(OUTPUT, named)


def build_network(
    model: nn.Module, task: Task, pipeline: Pipeline, preprocessing: Preprocessing
) -> tuple[Network, list[str]]:
    """Return the network to export, and the names of the transforms that callers must apply.

    `inside`: bytes in, interpreted outputs (probabilities) out; it has the transforms after the
    last one that changes sizes. `outside`: floats in, outputs (logits) out. Raises ModelError for a
    transform after that one which cannot be part of a graph.
    """
    names = list(pipeline.steps)
    if preprocessing == "outside":
        return Network(model, task, nn.Sequential(), interprets=False).eval(), names
    inside: list[nn.Module] = []
    while names and isinstance(step := pipeline.steps[names[-1]], ToFloat | Standardize):
        like, values = torch.zeros(1), list[Tensor]()
        if isinstance(step, Standardize):
            values = [step.mean.beside(like).clone(), step.std.beside(like).clone()]
        inside.insert(0, Normalize(*values))
        names.pop()
        if isinstance(step, ToFloat):
            return Network(model, task, nn.Sequential(*inside), interprets=True).eval(), names
    last = f"transforms.eval.{names[-1]}" if names else "transforms.eval"
    raise ModelError(
        f"{last} cannot be part of a graph that takes bytes: only data.transforms.ToFloat and "
        "Standardize at the end of the transforms can; use preprocessing=outside"
    )


@dataclass(frozen=True, slots=True)
class Format:
    """One format: how a file is written, with facts as its metadata, and loaded again."""

    file: str
    write: Callable[[Network, Tensor, Path, Mapping[str, Any]], None]
    load: Callable[[Path, Mapping[str, Any]], Answer]
    line: str  # of Python, that loads the file as `network`
    needs: tuple[str, ...] = ()  # libraries of the extra `onnx`
    remark: str = ""
    compiles: bool = False  # with the machine's C++ compiler
    runs_code: bool = True  # when it is loaded


def check_libraries(name: str) -> None:
    """Refuse a format whose libraries or compiler are not installed. Raises ModelError."""
    form = FORMATS[name]
    for library in form.needs:
        if importlib.util.find_spec(library) is None:
            raise ModelError(f"format={name} needs {library}: pip install -e '.[onnx]'")
    if form.compiles and not any(map(shutil.which, _COMPILERS)):
        raise ModelError(
            f"format={name} needs a C++ compiler, and none of {', '.join(_COMPILERS)} is in PATH: "
            "install one (apt install g++), or use format=torch_export"
        )


def exported_program(network: nn.Module, example: Tensor) -> ExportedProgram:
    """Export with a free batch size: without Python's own control flow first, then with it."""
    failures = []
    for strict in (False, True):
        try:
            return export(
                network,
                (example,),
                dynamic_shapes=({0: Dim("batch", min=1)},),
                strict=strict,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        except Exception as error:
            failures.append(error)
    raise ModelError(
        f"the model cannot be exported by torch.export: {_reason(failures[0])}; "
        "format=torchscript or format=safetensors may do"
    ) from failures[0]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def onnx_model(network: Network, example: Tensor) -> Any:
    """Return a network as ONNX's protocol buffer; outputs have their names, the batch its own."""
    with torch.no_grad():
        names = list(named_tensors(network(example)))
    with silently():
        program = torch.onnx.export(
            exported_program(network, example),
            input_names=["input"],
            output_names=names,
            verbose=False,
        )
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
    for node in proto.graph.node:
        node.doc_string = ""
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(proto.SerializeToString())


@contextmanager
def silently() -> Iterator[None]:
    """Suppress the exporters' and the quantizer's output about their passes."""
    loggers = [logging.getLogger(n) for n in (None, "onnxscript", "onnx_ir", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write_onnx(network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]) -> None:
    save_onnx(onnx_model(network, example), path, metadata)


def _load_onnx(path: Path, facts: Mapping[str, Any]) -> Answer:
    check_libraries("onnx")
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answer(x: Tensor) -> Any:
        found = map(torch.from_numpy, session.run(None, {"input": x.contiguous().numpy()}))
        named = dict(zip(names, found, strict=True))
        return named.get(OUTPUT, named)

    return answer


def _write_program(
    network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]
) -> None:
    with silently():
        program = exported_program(network, example)
        save(program, path, extra_files={"regimen.json": json.dumps(metadata)})


def _load_program(path: Path, facts: Mapping[str, Any]) -> Answer:
    program = torch.export.load(path).module()
    return lambda x: program(x)  # no submodule: a program has no evaluation mode to enter


def _write_torchscript(
    network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]
) -> None:
    """Trace a network; its model is compiled from source where a trace may lose a branch."""
    with silently():  # the deprecation is mentioned once, in `remark`
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", _LOST)
            traced = _traced(network, example)
        if any(issubclass(w.category, _LOST) for w in told):
            try:
                model = torch.jit.script(network.model)
            except Exception:  # Python that TorchScript does not know: will the trace do?
                pass
            else:
                again = Network(model, network.task, network.steps, network.interprets)
                traced = _traced(again.eval(), example)
        torch.jit.save(traced, str(path), _extra_files={"regimen.json": json.dumps(metadata)})


def _traced(network: Network, example: Tensor) -> Any:
    return torch.jit.trace(network, (example,), strict=False)  # type: ignore[no-untyped-call]


def _load_torchscript(path: Path, facts: Mapping[str, Any]) -> Answer:
    return torch.jit.load(str(path))  # type: ignore[no-any-return, no-untyped-call]


def _write_package(
    network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]
) -> None:
    inductor: Any = importlib.import_module("torch._inductor")
    program = exported_program(network, example)
    try:
        with silently(), torch.inference_mode():
            inductor.aoti_compile_and_package(
                program,
                package_path=str(path),
                inductor_configs={"aot_inductor.metadata": {"regimen": json.dumps(metadata)}},
            )
    except Exception as error:
        raise ModelError(
            f"the model cannot be compiled: {_reason(error)}; format=torch_export may do"
        ) from error


def _load_package(path: Path, facts: Mapping[str, Any]) -> Answer:
    inductor: Any = importlib.import_module("torch._inductor")
    package = inductor.aoti_load_package(str(path))
    return lambda x: package(x.contiguous())


def _no_graph(network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]) -> None:
    raise AssertionError("weights are written without a graph")


def load_weights(path: Path, facts: Mapping[str, Any]) -> nn.Module:
    """Build the model that `facts` name, with the weights of a file. Raises CheckpointError."""
    with no_initial_weights():
        model = instantiate(facts["model"], _key_="model")
    model.load_state_dict(read_safetensors(path))
    return model.eval()  # type: ignore[no-any-return]


FORMATS: Mapping[str, Format] = {
    "onnx": Format(
        "model.onnx",
        _write_onnx,
        _load_onnx,
        "import onnxruntime; network = onnxruntime.InferenceSession({path!r})",
        ("onnx", "onnxscript", "onnxruntime"),
        runs_code=False,
    ),
    "torch_export": Format(
        "model.pt2",
        _write_program,
        _load_program,
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
    WEIGHTS: Format("model.safetensors", _no_graph, load_weights, "", runs_code=False),
}
