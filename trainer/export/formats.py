"""The network that is exported, each format: how it is written and loaded again; and the card."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from trainer.inference.run import Run, origin_of
from trainer.runs.status import MANIFEST, read_json
from trainer.task import Task

Preprocessing = Literal["outside", "inside"]
Answer = Callable[[Tensor], Any]  # from a batch of inputs to a tensor, or several by name
_LOST: Any = torch.jit.TracerWarning  # type: ignore[attr-defined] # Python that a trace forgets
_COMPILERS = ("g++", "clang++", "c++")
WEIGHTS = "safetensors"  # the format without a graph
_CURVE = 20  # validations that the card lists
_FINE_TUNED = "models.pretrained.fine_tune"  # returns the network that it is given


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
        self.inside, self.model, self.task = inside, model, task
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
        mean, std = torch.zeros(1), torch.ones(1)
        if isinstance(step, Standardize):
            mean, std = (constant.clone() for constant in step.beside(mean))
        inside.insert(0, Normalize(mean, std))
        if isinstance(step, ToFloat):
            return Network(model, task, nn.Sequential(*inside)), names
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
        with warnings.catch_warnings(action="ignore"):
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


def _write_torchscript(graph: Exportable, path: Path) -> None:
    """Trace a network; its model is compiled from source where a trace may lose a branch."""
    network, trace = graph.network, partial(torch.jit.trace, strict=False)
    with silently():  # the deprecation is mentioned once, in `remark`
        with warnings.catch_warnings(record=True, action="always", category=_LOST) as told:
            traced = trace(network, (graph.example,))
        if any(issubclass(w.category, _LOST) for w in told):
            # Of Python that TorchScript does not know, the trace may do: it is verified.
            with suppress(Exception):
                model = torch.jit.script(network.model)
                traced = trace(Network(model, network.task, network.inside), (graph.example,))
        torch.jit.save(traced, str(path), _extra_files=graph.metadata)


def _inductor() -> Any:
    return importlib.import_module("torch._inductor")


def _write_package(graph: Exportable, path: Path) -> None:
    facts = {"aot_inductor.metadata": {"regimen": json.dumps(graph.facts)}}
    program = exported_program(graph)
    try:
        with silently(), torch.inference_mode():
            _inductor().aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=facts
            )
    except Exception as error:
        raise ModelError(
            f"the model cannot be compiled: {one_line(error)}; format=torch_export may do"
        ) from error


def _load_package(path: Path) -> Answer:
    package = _inductor().aoti_load_package(str(path))
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
        lambda graph, path: torch.export.save(
            exported_program(graph), path, extra_files=graph.metadata
        ),
        lambda path: torch.export.load(path).module(),
        "import torch; network = torch.export.load({path!r}).module()",
    ),
    "torchscript": Format(
        "model.ts",
        _write_torchscript,
        lambda path: torch.jit.load(str(path)),  # type: ignore[no-untyped-call]
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


def provenance(run: Run, checkpoint: str) -> dict[str, Any]:
    """Return the provenance of a model: run, checkpoint and its results, data, versions."""
    origin = origin_of(run.path, run.trainer(checkpoint), checkpoint)
    return {
        **origin,
        "name": run.config.name,
        "checkpoint": Path(origin["checkpoint"]).name,
        "results": {  # what was measured at its step is of this checkpoint
            key: value
            for line in run.metrics
            if line["step"] == origin["step"]
            for key, value in line.items()
            if key.startswith(("val/", "test/")) and value is not None
        },
        "data": read_json(run.path / MANIFEST).get("data") or [],
        "config": (run.path / "config.yaml").read_text(encoding="utf-8"),
    }


def model_card(run: Run, facts: Mapping[str, Any], folder: Path) -> str:
    """Return the card as Markdown; `folder` is where the file will be."""
    origin, verified = facts["provenance"], facts["verified"]
    average, target = origin["average"], (run.config.data.train or {}).get("_target_", "not named")
    by_caller = ", ".join(f"`{name}`" for name in facts["transforms_of_the_caller"])
    checked = [
        f"- Against the model in PyTorch on samples: {verified['samples']}; largest difference "
        f"{verified['largest_difference']:.2g}"
    ]
    if (moved := verified.get("difference_of_preprocessing")) is not None:
        checked.append(f"- Preprocessing in the graph against that of training: {moved:.2g}")
    quantized, after = facts.get("quantization"), facts.get("after", {})
    sizes = {name: [value, after[name]] for name, value in facts.get("before", {}).items()}
    validated = [line for line in run.metrics if any(key.startswith("val/") for key in line)]
    names = sorted({key for line in validated for key in line if key.startswith("val/")})
    curve = {line["step"]: [line.get(n) for n in names] for line in validated[-_CURVE:]}
    sections = {
        "Input and output": [
            f"- Input: {json.dumps(facts['input'])}",
            f"- Output: {facts['output']}",
            f"- Classes: {', '.join(facts['classes'] or ()) or 'not named'}",
            f"- Transforms that the caller applies before, in this order: {by_caller or 'none'}",
        ],
        "To run it": ["```python", *how_to_load(facts, folder), "```"],
        "Where it comes from": [
            f"- Run `{origin['run']}`, checkpoint `{origin['checkpoint']}` (sha256 "
            f"`{origin['sha256']}`), step {origin['step']}",
            f"- Weights: {f'the average of `callbacks.{average}`' if average else 'as trained'}",
            *(f"- Data: `{target}`, {_listed(split)}" for split in origin["data"] or [{}]),
            f"- Versions: {_listed(origin['versions'])}",
        ],
        f"Metrics of the checkpoint (step {origin['step']})": [
            f"- {name}: {value:.4f}" for name, value in origin["results"].items()
        ],
        "Quantization": quantized
        and [
            f"Quantized: {_listed(quantized)}.",
            "",
            *_table(["", "in floats", "quantized"], sizes),
        ],
        "Validations of the run": _table(["step", *names], curve),
        "Verified": checked,
        "Limits": [
            "- The metrics hold for data like the run's. Nothing was measured on any other data.",
            "- Fairness, calibration and robustness were not measured.",
        ],
        "Configuration": ["```yaml", origin["config"].rstrip("\n"), "```"],
    }
    model = f"Model: `{run.facts.model['_target_']}`, as `{facts['format']}`: {facts['file']}."
    lines = [f"# {origin['name']}", "", model, ""]
    for title, content in sections.items():
        lines += [f"## {title}", "", *content, ""] if content else []
    return "\n".join(lines)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _table(head: list[str], rows: Mapping[Any, Sequence[float | None]]) -> list[str]:
    cells = [
        [str(name), *("" if value is None else f"{value:.4g}" for value in values)]
        for name, values in rows.items()
    ]
    lines = [head, ["---"] * len(head), *cells] if cells else []
    return [f"| {' | '.join(line)} |" for line in lines]


def how_to_load(facts: Mapping[str, Any], folder: Path) -> list[str]:
    """Return lines of Python that load a file without Regimen's trainer."""
    path = str(folder.absolute() / facts["file"])
    if facts["format"] != WEIGHTS:
        call = "network(x)" if facts["format"] != "onnx" else "network.run(None, {'input': x})"
        shape = f"  # x: {facts['input']['dtype']} {facts['input']['shape']}"
        return [GRAPHS[facts["format"]].line.format(path=path), f"answers = {call}{shape}"]
    return [
        "from hydra.utils import instantiate; from safetensors.torch import load_file",
        f"model = instantiate({_bare(facts['model'])}, _convert_='all')",
        f"model.load_state_dict(load_file({path!r}))",
    ]


def _bare(value: Any) -> Any:
    """Return a node without the weights that it began with: those of the file take their place."""
    if isinstance(value, list):
        return [_bare(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("_target_") == _FINE_TUNED:
        return _bare(value["model"])
    dropped = {"weights": None, "pretrained": False} if "_target_" in value else {}
    return {key: dropped.get(key, _bare(part)) for key, part in value.items()}
