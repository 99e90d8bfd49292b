"""From the body of a request to a sample that a run's network is given."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image, UnidentifiedImageError

from conf.errors import ConfigError, Problem, one_line
from data.errors import reason
from data.formats.columns import MISSING, Columns
from data.formats.table import rows_as_described
from trainer.build.data import build_pipeline
from trainer.inference.generation import Generation, prompts_for
from trainer.inference.run import Run, as_picture

MAX_PIXELS = 40_000_000  # of an upload: half a gigabyte as floats while it is resized
MAX_TOKENS = 1_000  # of new text: other requests wait for it
# Those that `data.image_folder` reads; of Pillow's others some call programs or read slowly.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_REQUEST = Path("the request")  # where a cell is, in messages
_SHOWN = ("classes", "labels", "values", "mask")


class UploadError(Exception):
    """An upload that is not answered: the HTTP status, and the reason on one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(one_line(message))
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """A sample, and for text how it is continued."""

    sample: Any
    generation: Generation | None = None
    prompt: str = ""


class Intake(Protocol):
    """Turns a request's body into a question. Raises UploadError, DataError, ConfigError."""

    words: str  # what it accepts
    example: bytes  # a body

    def __call__(self, data: bytes) -> Question:
        """Read a body."""


def intake_of(run: Run) -> Intake:
    """Return what reads the requests to a run; ConfigError for one that has no form for them."""
    inputs, outputs = run.facts.inputs["kind"], run.facts.outputs["kind"]
    if inputs == "text" and outputs == "text":
        return PromptIntake(run)
    if outputs not in _SHOWN or inputs == "text":
        hint = "predict save=logits writes its answers"
        problem = f"the task of {run.path} says nothing of what its outputs mean"
        raise ConfigError(Problem("run", problem, hint))
    kinds: dict[str, Callable[[Run], Intake]] = {"picture": PictureIntake, "table": RowIntake}
    return kinds.get(inputs, ArrayIntake)(run)


class PictureIntake:
    """Takes a picture file."""

    def __init__(self, run: Run) -> None:
        self._pictures = run.pictures([])
        inputs = run.facts.inputs
        size = inputs["size"]
        colours = "grey" if inputs["channels"] == 1 else "RGB"
        resized = "" if size is None else f", resized to {size[0]} x {size[1]}"
        self.words = f"a picture file; {colours}{resized}"
        file = io.BytesIO()
        Image.new("L", (64, 64)).save(file, "PNG")
        self.example = file.getvalue()

    def __call__(self, data: bytes) -> Question:
        """Decode a picture of at most MAX_PIXELS."""
        check_picture(data)
        picture = as_picture(data, self._pictures.channels)
        return Question(self._pictures.brought_to_form(picture))


class RowIntake:
    """Takes the values of a table's columns as a JSON object."""

    def __init__(self, run: Run) -> None:
        self._form = run.facts.inputs
        self._transform = build_pipeline(run.config, "eval")
        features = self._form["features"]
        values = {
            f["name"]: f["categories"][0] if f["categories"] else float(f"{f['mean']:.3g}")
            for f in features
        }
        self.words = f"a JSON object with the columns {', '.join(values)}"
        self.example = json.dumps(values).encode()

    def __call__(self, data: bytes) -> Question:
        """Encode a row as training did."""
        cells = {str(name): [_cell(name, value)] for name, value in _json_object(data).items()}
        columns = Columns(_REQUEST, cells, 1)
        form = self._form
        rows = rows_as_described(columns, form["features"], form["missing"], self._transform)
        return Question(rows[0])


class PromptIntake:
    """Takes a prompt, and how it is continued, as a JSON object."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.words = (
            'a JSON object: {"prompt": text}; more keys: max_new_tokens (200), sampling (greedy, '
            "random), temperature, top_k"
        )
        prompts_for(run.facts, run.config, [], [])  # refuses a run that does not continue text
        letters = run.facts.classes or []
        known = [letter for letter in "The " if letter in letters] or letters[:1]
        self.example = json.dumps({"prompt": "".join(known), "max_new_tokens": 80}).encode()

    def __call__(self, data: bytes) -> Question:
        """Encode a prompt."""
        given = _json_object(data)
        prompt = given.pop("prompt", None)
        if not isinstance(prompt, str):
            raise UploadError(422, f'"prompt" is missing, or no text: send {self.words}')
        generation = Generation(**_checked(given), seed=self._run.config.seed)
        prompts = prompts_for(self._run.facts, self._run.config, ["the prompt"], [prompt])
        return Question(prompts[0], generation, prompt)


class ArrayIntake:
    """Takes the numbers of a sample, after the transforms, as a JSON object."""

    def __init__(self, run: Run) -> None:
        self.words = 'a JSON object: {"input": the numbers of a sample, in nested lists}'
        self.example = b'{"input": [0.0]}'

    def __call__(self, data: bytes) -> Question:
        """Make a tensor of floats."""
        try:
            return Question(torch.tensor(_json_object(data)["input"], dtype=torch.float32))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UploadError(422, f"send {self.words} ({reason(error)})") from error


def check_picture(data: bytes) -> None:
    """Raise UploadError for what is no picture, or too large a one; nothing is decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size
    except UnidentifiedImageError as error:
        raise UploadError(415, f"this is no picture: {', '.join(FORMATS)} are read") from error
    except Image.DecompressionBombError as error:
        raise UploadError(422, f"more than {MAX_PIXELS:,} pixels") from error
    except Exception as error:  # Pillow raises what its decoders do: struct.error, OSError...
        raise UploadError(422, f"cannot decode the picture: {reason(error)}") from error
    if width * height > MAX_PIXELS:
        raise UploadError(422, f"{width} x {height} pixels are more than {MAX_PIXELS:,}")


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UploadError(415, f"this is no JSON: {reason(error)}") from error
    if not isinstance(found, dict):
        raise UploadError(422, "send a JSON object: {...}")
    return found


def _cell(name: str, value: Any) -> str | None:
    """Return a value as a file would hold it; None where there is none."""
    if isinstance(value, list | dict):
        raise UploadError(422, f"{name!r} is no number, text or null")
    text = str(int(value) if isinstance(value, bool) else value).strip()
    return None if text in MISSING else text


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a generation. Raises UploadError."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "max_new_tokens": (lambda v: _whole(v) and 1 <= v <= MAX_TOKENS, f"from 1 to {MAX_TOKENS}"),
        "sampling": (lambda v: v in ("greedy", "random"), "greedy or random"),
        "temperature": (lambda v: _number(v) and 0 < v < 1e6, "a number above 0"),
        "top_k": (lambda v: _whole(v) and v >= 1, "a number from 1 on"),
    }
    for key, value in given.items():
        if key not in rules:
            raise UploadError(422, f"{key!r} is none of prompt, {', '.join(rules)}")
        fits, wanted = rules[key]
        if not fits(value):
            raise UploadError(422, f"{key} is {value!r}: {wanted}")
    random = given.get("sampling") == "random"
    if not random and (useless := {"temperature", "top_k"} & given.keys()):
        raise UploadError(422, f'{min(useless)} has no effect without "sampling": "random"')
    return dict(given)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value)
