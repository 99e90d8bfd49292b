"""An exported file as a module, for its evaluation."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.weights import no_initial_weights
from trainer.checkpoints.archive import digest
from trainer.checkpoints.weights import read_safetensors
from trainer.errors import ModelError
from trainer.export.artefact import WEIGHTS
from trainer.export.folder import FACTS
from trainer.export.formats import check_libraries
from trainer.targets.instantiate import instantiate

RUNS_CODE = ("torch_export", "torchscript", "aoti")


class Answering(nn.Module):
    """A file as a module with the outputs (logits) that a task expects of a model."""

    def __init__(self, answer: Callable[[Tensor], Tensor], facts: Mapping[str, Any]) -> None:
        super().__init__()
        self._answer = answer
        self._back = _OUTPUTS_OF[facts["output"]]
        if facts["output"] == "mask":
            self._back = partial(_one_hot, classes=facts["num_classes"])

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch of inputs to outputs."""
        return self._back(self._answer(x))


def facts_of_artefact(path: Path) -> dict[str, Any]:
    """Return the facts in `export.json` beside a file, whose digest must match.

    Raises ModelError.
    """
    beside = path.parent / FACTS
    if not path.is_file() or not beside.is_file():
        missing = path if not path.is_file() else beside
        raise ModelError(f"artefact={path}: there is no {missing}; regimen export writes both")
    try:
        facts = json.loads(beside.read_text(encoding="utf-8"))
        known = isinstance(facts, dict) and facts["file"] == path.name and facts["format"]
        output, names = facts["output"], list(facts["transforms_of_the_caller"])
        expected = facts["sha256"]
        known = known and (output != "mask" or isinstance(facts["num_classes"], int))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{beside} is damaged, or of an older version: export again") from error
    if not known or output not in _OUTPUTS_OF or facts["format"] not in _LOADERS:
        formats = ", ".join(_LOADERS)
        raise ModelError(
            f"artefact={path}: {beside} describes {facts['file']} as {facts['format']!r} with "
            f"output {output!r}: only logits, probabilities or masks of {formats} can be evaluated"
        )
    if digest(path) != expected:
        raise ModelError(f"artefact={path} is not the file that {beside} describes: export again")
    return {**facts, "transforms_of_the_caller": names}


def load_artefact(path: Path, facts: Mapping[str, Any], allow_code: bool) -> nn.Module:
    """Return a module that computes what a file does.

    Raises ModelError, for files whose format runs code when it is read unless `allow_code`.
    """
    name = facts["format"]
    if name in RUNS_CODE and not allow_code:
        raise ModelError(
            f"artefact={path}: a file of format {name} runs code when it is loaded: "
            "set allow_code=true if you trust its author"
        )
    try:
        return Answering(_LOADERS[name](path, facts), facts)
    except ModelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"artefact={path} cannot be loaded: {reason}") from error


def _onnx(path: Path, facts: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    check_libraries("onnx")
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.contiguous().numpy()})[0])


def _program(path: Path, facts: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    program = torch.export.load(path).module()
    return lambda x: program(x)  # no submodule: a program has no evaluation mode to enter


def _package(path: Path, facts: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    inductor: Any = importlib.import_module("torch._inductor")
    package = inductor.aoti_load_package(str(path))
    return lambda x: package(x.contiguous())


def _script(path: Path, facts: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.jit.load(str(path))  # type: ignore[no-any-return, no-untyped-call]


def _weights(path: Path, facts: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    with no_initial_weights():
        model = instantiate(facts["model"], _key_="model")
    model.load_state_dict(read_safetensors(path))
    return model.eval()  # type: ignore[no-any-return]


def _one_hot(answer: Tensor, classes: int) -> Tensor:
    """Turn class numbers [n, H, W] into outputs [n, classes, H, W]."""
    return nn.functional.one_hot(answer, classes).movedim(-1, 1).float()


_LOADERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Callable[[Tensor], Tensor]]] = {
    "onnx": _onnx,
    "torch_export": _program,
    "torchscript": _script,
    "aoti": _package,
    WEIGHTS: _weights,
}
# From the outputs of a file to those that its task expects of a model.
_OUTPUTS_OF: Mapping[str, Callable[..., Tensor]] = {
    "logits": lambda answer: answer,
    "classes": torch.log,  # of probabilities: their softmax is the same
    "labels": torch.logit,
    "values": lambda answer: answer,
    "mask": _one_hot,  # ranks the classes; the loss of such outputs means nothing
}
