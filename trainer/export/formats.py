"""Each export format: how it is written, and how it is loaded again and run."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, export, save

from trainer.errors import ModelError
from trainer.export.network import Network

# Loaded in a separate process, which has nothing of this one.
_LOAD = {
    "torch_export": "torch.export.load(path).module()",
    "torchscript": "torch.jit.load(path)",
    "aoti": "torch._inductor.aoti_load_package(path)",
}
_LOST: Any = torch.jit.TracerWarning  # type: ignore[attr-defined] # Python that a trace forgets
_COMPILERS = ("g++", "clang++", "c++")
_FRESH = """
import sys, torch
path, questions, answers = sys.argv[1:]
network = {load}
with torch.inference_mode():
    torch.save([network(x) for x in torch.load(questions, weights_only=True)], answers)
"""


@dataclass(frozen=True, slots=True)
class Format:
    """One format of `export`."""

    file: str
    write: Callable[[Network, Tensor, Path, Mapping[str, Any]], None]
    answer: Callable[[Path, Sequence[Tensor], Path], list[Tensor]]  # with a folder for its use
    needs: tuple[str, ...] = ()  # libraries
    extra: str = ""  # extra that installs them
    remark: str = ""
    compiles: bool = False  # with the machine's C++ compiler


def check_libraries(name: str) -> None:
    """Refuse a format whose libraries are not installed. Raises ModelError."""
    form = FORMATS[name]
    for library in form.needs:
        if importlib.util.find_spec(library) is None:
            raise ModelError(f"format={name} needs {library}: pip install -e '.[{form.extra}]'")
    if form.compiles and not any(map(shutil.which, _COMPILERS)):
        raise ModelError(
            f"format={name} needs a C++ compiler, and none of {', '.join(_COMPILERS)} is in PATH: "
            "install one (apt install g++), or use format=torch_export"
        )


def exported_program(network: Network, example: Tensor) -> ExportedProgram:
    """Export with a free batch size: without Python's own control flow first, then with it."""
    shapes = ({0: Dim("batch", min=1)},)
    failures = []
    for strict in (False, True):
        try:
            return export(
                network,
                (example,),
                dynamic_shapes=shapes,
                strict=strict,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        except Exception as error:
            failures.append(error)
    reason = " ".join(str(failures[0]).split())[:300]
    raise ModelError(
        f"the model cannot be exported by torch.export: {reason}; "
        "format=torchscript or format=safetensors may do"
    ) from failures[0]


def _write_program(
    network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]
) -> None:
    with silently():
        save(
            exported_program(network, example),
            path,
            extra_files={"regimen.json": json.dumps(metadata)},
        )


def _write_onnx(network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]) -> None:
    onnx: Any = importlib.import_module("onnx")
    with silently():
        program = torch.onnx.export(
            exported_program(network, example),
            input_names=["input"],
            output_names=["output"],
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key = key
        entry.value = value if isinstance(value, str) else json.dumps(value)
    onnx.save(proto, str(path))


@contextmanager
def silently() -> Iterator[None]:
    """Suppress the exporters' output about their passes."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx")]
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


def _answer_onnx(path: Path, questions: Sequence[Tensor], folder: Path) -> list[Tensor]:
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(session.run(None, {"input": x.numpy()})[0]) for x in questions]


def _write_torchscript(
    network: Network, example: Tensor, path: Path, metadata: Mapping[str, Any]
) -> None:
    extra = {"regimen.json": json.dumps(metadata)}
    with silently():  # the deprecation is mentioned once, in `remark`
        torch.jit.save(_scripted(network, example), str(path), _extra_files=extra)


def _scripted(network: Network, example: Tensor) -> torch.jit.ScriptModule:
    """Trace a network; its model is compiled from source where a trace may lose a branch."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", _LOST)
        traced = torch.jit.trace(network, (example,))  # type: ignore[no-untyped-call]
    if not any(issubclass(w.category, _LOST) for w in told):
        return traced  # type: ignore[no-any-return]
    try:
        model = torch.jit.script(network.model)
    except Exception:  # Python that TorchScript does not know; whether the trace will do is tried
        return traced  # type: ignore[no-any-return]
    again = network.with_model(model).eval()
    return torch.jit.trace(again, (example,))  # type: ignore[no-untyped-call, no-any-return]


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
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the model cannot be compiled: {reason}; format=torch_export may do"
        ) from error


def _answer_fresh(name: str) -> Callable[[Path, Sequence[Tensor], Path], list[Tensor]]:
    def answer(path: Path, questions: Sequence[Tensor], folder: Path) -> list[Tensor]:
        asked, answered = folder / "questions.pt", folder / "answers.pt"
        torch.save(list(questions), asked)
        code = _FRESH.format(load=_LOAD[name])
        command = [sys.executable, "-P", "-W", "ignore", "-c", code]
        done = subprocess.run(
            [*command, str(path.absolute()), str(asked), str(answered)],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelError(f"{path.name} cannot be loaded again: {reason}")
        answers: list[Tensor] = torch.load(answered, weights_only=True)
        return answers

    return answer


def milliseconds(answer: Callable[[Tensor], object], batch: Tensor) -> float:
    """Return the time of a call: the median of 20, after three for warm-up."""
    times = []
    with torch.inference_mode():
        for _ in range(23):
            begin = time.perf_counter()
            answer(batch)
            times.append(time.perf_counter() - begin)
    return 1e3 * median(times[3:])


def speed_of_package(network: Network, path: Path, samples: Tensor) -> dict[str, float]:
    """Return the milliseconds of a compiled package and of the model, for 1 and 32 samples."""
    inductor: Any = importlib.import_module("torch._inductor")
    package = inductor.aoti_load_package(str(path))  # written, loaded and compared just before
    speed = {}
    for size in (1, 32):
        batch = samples[:size].clone()
        speed[f"ms_of_{size}"] = milliseconds(package, batch)
        speed[f"eager_ms_of_{size}"] = milliseconds(network, batch)
    return speed


FORMATS: Mapping[str, Format] = {
    "onnx": Format(
        "model.onnx",
        _write_onnx,
        _answer_onnx,
        ("onnx", "onnxscript", "onnxruntime"),
        "onnx",
    ),
    "torch_export": Format("model.pt2", _write_program, _answer_fresh("torch_export")),
    "torchscript": Format(
        "model.ts",
        _write_torchscript,
        _answer_fresh("torchscript"),
        remark="TorchScript is deprecated in torch; onnx and torch_export are its successors",
    ),
    "aoti": Format(
        "model.pt2",
        _write_package,
        _answer_fresh("aoti"),
        compiles=True,
        remark="the package is machine code for this kind of CPU and this version of torch; C++ "
        "programs set AOTI_RUNTIME_CHECK_INPUTS=1, or a wrong size reads out of bounds",
    ),
}
