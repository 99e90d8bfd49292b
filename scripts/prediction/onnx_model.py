"""`predict model=FILE.onnx`: the answers of an exported file, where torch need not be installed."""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from conf.errors import ConfigError, Problem, raise_problems
from data.errors import DataError, UnreadableError, reason
from scripts.cli.keys import Take, one_of, only_keys, true_or_false, whole
from scripts.prediction.options import FORMATS
from scripts.prediction.table import GrowingTable, check_format

Array = Any  # of numpy
_KEYS: dict[str, Take] = {
    "model": Path,
    "source": str,
    "out": Path,
    "top_k": whole(),
    "on_error": one_of("raise", "skip"),
    "overwrite": true_or_false,
    "batch_size": whole(),
}
_DEFAULTS = {
    "out": Path("predictions.csv"),
    "top_k": 1,
    "on_error": "raise",
    "overwrite": False,
    "batch_size": 32,
}
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An exported classifier or regression, and how pictures are prepared for it."""

    answer: Callable[[Array], Array]
    classes: Sequence[str] | None
    kind: str  # classes, labels or values
    from_logits: bool
    threshold: float
    channels: int
    size: Sequence[int] | None
    steps: Sequence[Mapping[str, Any]]

    def picture(self, path: str) -> Array:
        """Return a file as the model takes it, [channels, H, W]. Raises UnreadableError."""
        try:
            with Image.open(path) as opened:
                image = ImageOps.exif_transpose(opened)
                if image.mode.startswith(("I", "F")):
                    raise UnreadableError(f"cannot decode {path}: more than 8 bits a pixel")
                pixels = np.asarray(image.convert(_MODES[self.channels]))
        except UnreadableError:
            raise
        except Exception as error:  # Pillow's many, and its bound against bombs
            raise UnreadableError(f"cannot decode {path}: {reason(error)}") from error
        planes = pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)
        values = _resized(planes, self.size)
        for step in self.steps:
            values = _STEPS[step["_target_"]](values, step)
        return values

    def rows(self, names: Sequence[str], pictures: Sequence[Array], top_k: int) -> list[Any]:
        """Return a row for each picture."""
        outputs = np.asarray(self.answer(np.stack(pictures)), dtype=np.float64)
        return [{"file": n, **self._row(o, top_k)} for n, o in zip(names, outputs, strict=True)]

    def _row(self, output: Array, top_k: int) -> dict[str, Any]:
        if self.kind == "values":
            values = output.reshape(-1).tolist()
            if len(values) == 1:
                return {"prediction": values[0]}
            return {f"prediction{place}": value for place, value in enumerate(values, start=1)}
        if self.kind == "labels":
            shares = 1 / (1 + np.exp(-output)) if self.from_logits else output
            found = [i for i, share in enumerate(shares) if share > self.threshold]
            return {
                "prediction": [self._name(i) for i in found],
                "probability": [float(shares[i]) for i in found],
            }
        shares = output
        if self.from_logits:
            shares = np.exp(output - output.max())
            shares = shares / shares.sum()
        row: dict[str, Any] = {}
        for place, i in enumerate(np.argsort(-shares, kind="stable")[:top_k].tolist(), start=1):
            row["prediction" if place == 1 else f"top{place}"] = self._name(i)
            row["probability" if place == 1 else f"probability{place}"] = float(shares[i])
        return row

    def _name(self, number: int) -> str:
        return self.classes[number] if self.classes else str(number)


def read_model(path: Path) -> OnnxModel:
    """Open a file of `regimen export format=onnx` or `regimen quantize`. Raises ConfigError."""
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        hint = "pip install onnxruntime"
        raise ConfigError(Problem("model", "an .onnx file needs onnxruntime", hint)) from None
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConfigError(Problem("model", f"{path} cannot be loaded: {reason(error)}")) from error
    facts = {k: _plain(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
    if missing := [
        key for key in ("inputs", "outputs", "transforms_of_the_caller") if key not in facts
    ]:
        message = f"{path} does not say its {missing[0]}"
        hint = "only files of regimen export and quantize do; export an older one again"
        raise ConfigError(Problem("model", message, hint))
    kind, inputs = facts["outputs"]["kind"], facts["inputs"]
    steps = list(facts["transforms_of_the_caller"].values())
    unfit = [step["_target_"] for step in steps if step["_target_"] not in _STEPS]
    if kind not in ("classes", "labels", "values") or inputs["kind"] != "picture" or unfit:
        what = unfit[0] if unfit else f"outputs of kind {kind} for inputs of kind {inputs['kind']}"
        hint = f"predict run=RUN does it; without torch: {', '.join(_STEPS)} of pictures"
        raise ConfigError(Problem("model", f"{path} needs {what}", hint))
    return OnnxModel(
        lambda x: session.run(None, {"input": x})[0],
        facts.get("classes"),
        kind,
        facts["output"] == "logits",
        float(facts["outputs"].get("threshold", 0.5)),
        inputs["channels"],
        inputs["size"],
        steps,
    )


def answer_without_torch(overrides: Sequence[str], lines: Sequence[str]) -> int:
    """Write the table of `predict model=FILE.onnx source=...`."""
    values = _options(overrides)
    table, size = values["out"], values["batch_size"]
    check_format(table)
    model = read_model(values["model"])
    files = _files(values["source"], lines)
    header = {k: str(v) for k, v in values.items() if k != "overwrite"} | {"samples": len(files)}
    with closing(GrowingTable(table, header, size, resume=False)) as rows:
        for start in range(0, len(files), size):
            rows.write(_rows_of(model, files[start : start + size], values))
        rows.finish()
    print(rows.told())
    return 0


def _rows_of(model: OnnxModel, names: Sequence[str], values: Mapping[str, Any]) -> Iterator[Any]:
    pictures, failed = {}, {}
    for name in names:
        try:
            pictures[name] = model.picture(name)
        except UnreadableError as error:
            if values["on_error"] == "raise":
                raise
            failed[name] = str(error)
    if pictures:
        shapes = {picture.shape for picture in pictures.values()}
        if len(shapes) > 1:
            raise DataError(f"pictures of several sizes, such as {sorted(shapes)[:2]}: resize them")
    found = list(pictures)
    rows = model.rows(found, list(pictures.values()), values["top_k"]) if found else []
    answers = dict(zip(found, rows, strict=True))
    for name in names:
        yield answers.get(name) or {"file": name, "error": failed[name]}


def _options(overrides: Sequence[str]) -> dict[str, Any]:
    required = {"source": "a folder, a file, a glob or -"}
    given, problems = only_keys("predict model=FILE.onnx", overrides, _KEYS, required)
    values = {**_DEFAULTS, **given}
    if values["out"].suffix not in FORMATS:
        problems.append(Problem("out", f"{values['out']} ends with none of {', '.join(FORMATS)}"))
    if values["out"].exists() and not values["overwrite"]:
        problems.append(Problem("out", f"{values['out']} exists", "overwrite=true replaces it"))
    raise_problems(problems)
    return values


def _files(source: str, lines: Sequence[str]) -> list[str]:
    folder = Path(source).expanduser()
    if source == "-":
        found = [line.rstrip("\n") for line in lines if line.strip()]
    elif folder.is_dir():
        kinds = {ext for ext, form in Image.registered_extensions().items() if form in Image.OPEN}
        found = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in kinds)
    else:
        found = sorted(glob.glob(str(folder), recursive=True)) or [str(folder)]
    if not found or not (source == "-" or folder.is_dir() or Path(found[0]).exists()):
        raise DataError(f"source={source} names no picture: give a folder, a file or a glob")
    return found


def _resized(planes: Array, size: Sequence[int] | None) -> Array:
    """Return bytes [C, H, W] at `size`, as the run's data are resized: bilinear, antialiased."""
    if size is None or list(planes.shape[1:]) == list(size):
        return planes
    height, width = size
    floats = [
        Image.fromarray(plane.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR)
        for plane in planes
    ]
    return np.stack([np.asarray(p).round().clip(0, 255).astype(np.uint8) for p in floats])


def _to_float(values: Array, step: Mapping[str, Any]) -> Array:
    return values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values


def _standardize(values: Array, step: Mapping[str, Any]) -> Array:
    mean, std = (np.array(step[k], np.float32).reshape(-1, 1, 1) for k in ("mean", "std"))
    return (values - mean) / std


_STEPS: Mapping[str, Callable[[Array, Mapping[str, Any]], Array]] = {
    "data.transforms.ToFloat": _to_float,
    "data.transforms.Standardize": _standardize,
}


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
