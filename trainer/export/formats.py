"""The network that is exported; how each format is written and loaded again; the card beside it."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from regimen.data.transforms import Pipeline, Standardize, ToFloat
from regimen.trainer.errors import ModelError, short_message
from regimen.trainer.export.huggingface import FOLDERS
from regimen.trainer.inference.predictor import OUTPUT, named_tensors
from regimen.trainer.inference.run import Run, origin_of
from regimen.trainer.runs.status import MANIFEST, read_json
from regimen.trainer.task import Task

Preprocessing = Literal["outside", "inside"]
Answer = Callable[[Tensor], Any]  # from a batch of inputs to a tensor, or several by name
Facts = dict[str, Any]  # about a file, written beside it
# The warning about Python code whose result a trace stores as a constant.
_TRACER_WARNING: Any = torch.jit.TracerWarning  # type: ignore[attr-defined]
WEIGHTS = "safetensors"  # the format without a graph
_LISTED = 20  # validations that the card lists
_FINE_TUNED = "regimen.models.pretrained.fine_tune"  # returns the network in its argument `model`


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

    inside: the transforms that are part of the graph. With them the network returns what the task
    makes of its outputs (probabilities); without them it takes floats and returns logits.
    """

    def __init__(self, model: nn.Module, task: Task, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.model = model
        self.task = task
        self.eval()

    def forward(self, x: Tensor) -> Any:
        """Map a batch of inputs to a tensor, or to tensors by name."""
        if self.inside is None:
            output = self.task.prediction_step(self.model, x)
        else:
            output = self.task.interpret(self.task.prediction_step(self.model, self.inside(x)))
        tensors = named_tensors(output)
        return tensors.get(OUTPUT, tensors)


def build_network(
    model: nn.Module, task: Task, pipeline: Pipeline, preprocessing: Preprocessing
) -> tuple[Network, list[str]]:
    """Return the network to export, and the names of the transforms that callers must apply.

    With preprocessing=inside the network takes bytes and has the transforms from ToFloat on. Raises
    ModelError for one of them that cannot be part of a graph.
    """
    names = list(pipeline.steps)
    if preprocessing == "outside":
        return Network(model, task), names
    # From the last transform back to the one that makes floats of bytes; all between standardize.
    # (x - a) / b, then (x - mean) / std, is (x - (a + b * mean)) / (b * std).
    mean = torch.zeros(1)
    std = torch.ones(1)
    while names and isinstance(step := pipeline.steps[names[-1]], ToFloat | Standardize):
        names.pop()
        if isinstance(step, ToFloat):
            return Network(model, task, Normalize(mean, std)), names
        first_mean, first_std = step.beside(mean)
        mean = first_mean + first_std * mean
        std = first_std * std
    last = f"transforms.eval.{names[-1]}" if names else "transforms.eval"
    raise ModelError(
        f"{last} cannot be part of a graph that takes bytes: only ToFloat and Standardize (of "
        "regimen.data.transforms) at the end of the transforms can; use preprocessing=outside"
    )


class Exportable(NamedTuple):
    """What is written as a graph: the network, samples of its inputs, and the facts about both."""

    network: nn.Module
    samples: Tensor
    facts: Facts

    @property
    def example(self) -> Tensor:
        """The inputs that it is traced with."""
        return self.samples[:2].clone()

    @property
    def metadata(self) -> dict[str, str]:
        """The facts, as an extra file of torch's archive."""
        return {"regimen.json": json.dumps(self.facts)}


class Format(NamedTuple):
    """One format: how a graph is written, with its facts, and loaded again."""

    file: str
    write: Callable[[Exportable, Path], None]
    load: Callable[[Path], Answer]
    line: str  # Python code that loads the file as `network`
    needs: tuple[str, ...] = ()  # libraries of the extra `onnx`
    remark: str = ""
    runs_code: bool = True  # loading the file can run code


def check_libraries(name: str) -> None:
    """Refuse a format whose libraries are not installed. Raises ModelError."""
    for library in GRAPHS[name].needs:
        if importlib.util.find_spec(library) is None:
            raise ModelError(f"format={name} needs {library}: pip install 'torch-regimen[onnx]'")


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
            f"the model cannot be exported by torch.export: {short_message(error)}; "
            "format=torchscript or format=safetensors may do"
        ) from error


def onnx_model(graph: Exportable) -> Any:
    """Return a graph as ONNX's protocol buffer, with named outputs and a batch of any size."""
    with torch.no_grad():
        names = list(named_tensors(graph.network(graph.example)))
    with silently():
        program = torch.onnx.export(
            exported_program(graph), input_names=["input"], output_names=names, verbose=False
        )
    assert program is not None
    proto = program.model_proto
    # They call the batch by the exporter's name, and the runtime would warn about them.
    del proto.graph.value_info[:]
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
        entry.key = key
        entry.value = value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(proto.SerializeToString())


def _load_onnx(path: Path) -> Answer:
    check_libraries("onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answer(x: Tensor) -> Any:
        outputs = session.run(None, {"input": x.contiguous().numpy()})
        tensors = dict(zip(names, map(torch.from_numpy, outputs), strict=True))
        return tensors.get(OUTPUT, tensors)

    return answer


def _write_torchscript(graph: Exportable, path: Path) -> None:
    """Trace a network; compile its model from source if the trace may lose a branch."""
    network = graph.network
    assert isinstance(network, Network)  # detectors have their own writer
    trace = partial(torch.jit.trace, strict=False)
    with silently():  # the deprecation is mentioned once, in `remark`
        with warnings.catch_warnings(record=True, action="always", category=_TRACER_WARNING) as log:
            traced = trace(network, (graph.example,))
        if any(issubclass(warning.category, _TRACER_WARNING) for warning in log):
            # If scripting fails, keep the trace: the file is verified against the model anyway.
            with suppress(Exception):
                model = torch.jit.script(network.model)
                traced = trace(Network(model, network.task, network.inside), (graph.example,))
        torch.jit.save(traced, str(path), _extra_files=graph.metadata)


def _write_package(graph: Exportable, path: Path) -> None:
    metadata = {"regimen": json.dumps(graph.facts)}
    from torch import _inductor  # takes seconds, and few need it

    program = exported_program(graph)
    try:
        with silently(), torch.inference_mode():
            _inductor.aoti_compile_and_package(
                program,
                package_path=str(path),
                inductor_configs={"aot_inductor.metadata": metadata},
            )
    except Exception as error:
        raise ModelError(
            f"the model cannot be compiled: {short_message(error)}; format=torch_export may do"
        ) from error


def _load_package(path: Path) -> Answer:
    from torch import _inductor

    package = _inductor.aoti_load_package(str(path))
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
        remark="the package is machine code for this kind of CPU and this version of torch; C++ "
        "programs set AOTI_RUNTIME_CHECK_INPUTS=1, or a wrong size reads out of bounds",
    ),
}


def provenance(run: Run, checkpoint: str) -> Facts:
    """Return the provenance of a model: run, checkpoint and its results, data, versions."""
    origin = origin_of(run.path, run.components(checkpoint), checkpoint)
    # What was measured at the checkpoint's step was measured with its weights.
    lines = [line.items() for line in run.metrics if line["step"] == origin["step"]]
    measured = {key: value for line in lines for key, value in line if value is not None}
    results = {k: v for k, v in measured.items() if k.startswith(("val/", "test/"))}
    return {
        **origin,
        "name": run.config.name,
        "checkpoint": Path(origin["checkpoint"]).name,
        "results": results,
        "data": read_json(run.path / MANIFEST).get("data") or [],
        "config": (run.path / "config.yaml").read_text("utf-8"),
    }


def model_card(run: Run, facts: Facts, folder: Path) -> str:
    """Return the card as Markdown; `folder` is where the file will be."""
    origin = dict(facts["provenance"])
    config = origin.pop("config")
    results = origin.pop("results")
    validations = []
    for line in run.metrics:
        values = {k: v for k, v in line.items() if k == "step" or k.startswith("val/")}
        if values.keys() - {"step"}:
            validations.append(values)
    about = {**facts, "provenance": origin, "validations": validations[-_LISTED:]}
    text = yaml.safe_dump(about, sort_keys=False, allow_unicode=True, default_flow_style=None)
    sections = {
        "To run it": ["```python", *how_to_load(facts, folder), "```"],
        f"Metrics of the checkpoint (step {origin['step']})": [
            f"- {name}: {value:.4f}" for name, value in results.items()
        ],
        "What it takes, where it comes from, how it was verified": ["```yaml", text, "```"],
        "Limits": [
            "- The metrics hold for data like the run's. Nothing was measured on any other data.",
            "- Fairness, calibration and robustness were not measured.",
        ],
        "Configuration": ["```yaml", config.rstrip("\n"), "```"],
    }
    lines = [f"# {origin['name']}", ""]
    for title, content in sections.items():
        if content:
            lines += [f"## {title}", "", *content, ""]
    return "\n".join(lines)


def how_to_load(facts: Facts, folder: Path) -> list[str]:
    """Return lines of Python that load a file without Regimen's trainer."""
    path = str(folder.absolute() / facts["file"])
    if facts["format"] == WEIGHTS:
        return [
            "from hydra.utils import instantiate; from safetensors.torch import load_file",
            f"model = instantiate({_bare(facts['model'])}, _convert_='all')",
            f"model.load_state_dict(load_file({path!r}))",
        ]
    if facts["format"] in FOLDERS:
        return _lines_of_folder(facts, str(folder.absolute()))
    call = "network.run(None, {'input': x})" if facts["format"] == "onnx" else "network(x)"
    shape = f"  # x: {facts['input']['dtype']} {facts['input']['shape']}"
    return [GRAPHS[facts["format"]].line.format(path=path), f"answers = {call}{shape}"]


def _lines_of_folder(facts: Facts, folder: str) -> list[str]:
    """Return lines that load a folder by transformers or peft."""
    kind = facts["class"]
    lines = [f"from transformers import {kind}"]
    if facts["base"] is None:
        lines.append(f"model = {kind}.from_pretrained({folder!r})")
    else:
        lines += [
            "from peft import PeftModel",
            f"base = {kind}.from_pretrained({facts['base']!r})",
            f"model = PeftModel.from_pretrained(base, {folder!r})",
        ]
    if facts["tokenizer"]:
        lines.append("from transformers import AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({folder!r})")
    return lines


def _bare(value: Any) -> Any:
    """Return a node without its initial weights: those of the file replace them."""
    if isinstance(value, list):
        return [_bare(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("_target_") == _FINE_TUNED:
        return _bare(value["model"])
    replaced = {"weights": None, "pretrained": False} if "_target_" in value else {}
    return {key: replaced.get(key, _bare(part)) for key, part in value.items()}
