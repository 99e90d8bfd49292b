"""From the bytes of an uploaded picture to a run's answer."""

from __future__ import annotations

import io
import time
import warnings
from base64 import b64encode
from collections import Counter
from contextlib import ExitStack, suppress
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from conf.errors import ConfigError, Problem, one_line
from data.errors import DataError, reason
from data.loading.collate import collate
from scripts.prediction.arrays import mask_picture, palette
from trainer import rng
from trainer.export.artefact import provenance
from trainer.inference.predictor import Answers, Predictor
from trainer.inference.rows import Row, Rows
from trainer.inference.run import Run, as_picture
from trainer.rng import derived

MAX_PIXELS = 40_000_000  # of an upload: as floats, while resized, half a gigabyte
# Those that `data.image_folder` reads. Some of Pillow's others start programs or are slow.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_SHOWN = ("classes", "labels", "values", "mask")


class UploadError(Exception):
    """A refused upload: the HTTP status, and the reason on one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(one_line(message))
        self.status = status


class Answerer:
    """A run's model, loaded to answer for one picture at a time, in one thread.

    Raises ConfigError for a run that takes no pictures or whose answers have no known meaning.
    """

    def __init__(self, run: Run, checkpoint: str, top_k: int) -> None:
        check_run(run)
        self.run = run
        self.top_k = top_k
        self._checkpoint = checkpoint
        self._trainer = run.trainer(checkpoint)
        self._predictor = Predictor(self._trainer)
        self._pictures = run.pictures([])
        self._weights = ExitStack()

    @torch.inference_mode()
    def open(self) -> None:
        """Load the evaluated weights into the model until `close`, and run it once."""
        self._weights.enter_context(self._predictor.ready())
        file = io.BytesIO()
        Image.new("L", (64, 64)).save(file, "PNG")
        with suppress(UploadError):  # the first call takes many times as long as later ones
            self(file.getvalue())

    @torch.inference_mode()
    def close(self) -> None:
        """Restore the weights of the checkpoint."""
        self._weights.close()

    def card(self) -> dict[str, Any]:
        """Return the facts about the run that the page shows, as plain values."""
        facts, origin = self.run.facts, provenance(self.run, self._checkpoint)
        weights = "" if origin["average"] is None else f", average {origin['average']}"
        parameters = sum(p.numel() for p in self._trainer.model.parameters())
        results = {
            name: f"{value:.4f}"
            for name, value in origin["results"].items()
            if value is not None and name.startswith(("val/", "test/"))
        }
        data = (self.run.config.data.train or {}).get("_target_", "not named")
        return {
            "name": origin["name"],
            "kind": facts.outputs["kind"],
            "channels": facts.inputs["channels"],
            "top_k": min(self.top_k, facts.num_classes or self.top_k),
            "facts": {
                "model": f"{facts.model['_target_']}, {parameters:,} parameters",
                "data": str(data),
                "checkpoint": f"{origin['checkpoint']}, step {origin['step']}{weights}",
                **results,
                "classes": ", ".join(facts.classes or ()) or "not named",
                "input": _input_form(facts.inputs),
                "versions": ", ".join(f"{k} {v}" for k, v in origin["versions"].items()),
            },
        }

    @torch.inference_mode()
    def __call__(self, data: bytes, top_k: int | None = None, show: bool = False) -> Row:
        """Return the row of `Run.predict` for a picture file, and the time it took.

        show: with `input`, what the network was given, and for a mask the classes in it.
        Raises UploadError for anything but a picture that the run can process.
        """
        check_upload(data)
        trainer = self._trainer
        began = time.perf_counter()
        seed = derived(trainer.options.seed, "predict")
        try:
            with rng.keyed(
                trainer.strategy.device, seed
            ):  # each picture draws as the first one does
                sample = self._pictures.brought_to_form(as_picture(data, self._pictures.channels))
                ready = time.perf_counter()
                values, _ = self._predictor.ask(trainer.to_device(collate([sample])), 1)
        except (DataError, ConfigError) as error:
            raise UploadError(422, str(error)) from error
        ended = time.perf_counter()
        rows = Rows(self.run.facts, top_k or self.top_k, str, lambda _, mask: _mask_url(mask))
        row = next(rows(Answers([0], values, None, {})))
        del row["file"]
        if show:
            row |= {"input": _shown(sample)} | self._areas(values)
        row["milliseconds"] = {"read": 1e3 * (ready - began), "model": 1e3 * (ended - ready)}
        return row

    def _areas(self, values: Tensor) -> dict[str, Any]:
        """Return the share and the colour of each class of a mask, the largest first."""
        if self.run.facts.outputs["kind"] != "mask":
            return {}
        names, colours = self.run.facts.classes, palette()
        counts = Counter(values.flatten().tolist()).most_common()
        return {
            "areas": [
                {
                    "name": names[number] if names else str(number),
                    "share": count / values.numel(),
                    "colour": colours[3 * number : 3 * number + 3],
                }
                for number, count in counts
            ]
        }


def check_run(run: Run) -> None:
    """Raise ConfigError for a run whose inputs or outputs the page cannot show."""
    inputs, outputs = run.facts.inputs["kind"], run.facts.outputs["kind"]
    if inputs != "picture":
        hint = "predict run=RUN_DIR answers for its data"
        problem = f"{run.path} was not trained on pictures (its inputs: {inputs})"
    elif outputs not in _SHOWN:
        hint = "predict save=logits writes its answers"
        problem = f"the task of {run.path} says nothing of what its outputs mean"
    else:
        return
    raise ConfigError(Problem("run", problem, hint))


def check_upload(data: bytes) -> None:
    """Raise UploadError for anything but a picture of a permitted size; nothing is decoded."""
    if not data:
        raise UploadError(422, "the request has no body: send a picture file")
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


def _input_form(inputs: dict[str, Any]) -> str:
    colours = "grey" if inputs["channels"] == 1 else "RGB"
    size = inputs["size"]
    return colours if size is None else f"{colours}, resized to {size[0]} x {size[1]}"


def _shown(sample: Any) -> str | None:
    """Return a transformed picture as a PNG, its values spread from black to white."""
    if not isinstance(sample, Tensor) or sample.ndim not in (3, 4):
        return None
    image = (sample[0] if sample.ndim == 4 else sample).float()  # the first of several views
    image = image if image.shape[0] == 3 else image.mean(0, keepdim=True)
    image = image - image.min()
    image = (image / image.max().clamp(min=1e-12) * 255).round().byte()
    pixels = image.permute(1, 2, 0).squeeze(-1).cpu().numpy()
    return _png_url(Image.fromarray(pixels))


def _mask_url(mask: Tensor) -> str:
    return _png_url(mask_picture(mask))


def _png_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
