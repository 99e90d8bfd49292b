"""From the body of a request to a run's answer."""

from __future__ import annotations

import io
import time
from base64 import b64encode
from collections import Counter
from contextlib import ExitStack, suppress
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from conf.errors import ConfigError
from data.errors import DataError
from data.loading.collate import collate
from scripts.prediction.arrays import mask_picture, palette
from scripts.serving.intake import PictureIntake, UploadError, intake_of
from trainer import rng
from trainer.errors import ModelError
from trainer.export.artefact import provenance
from trainer.inference.predictor import Answers, Predictor
from trainer.inference.rows import Row, Rows
from trainer.inference.run import Run
from trainer.rng import derived


class Answerer:
    """A run's model, loaded to answer for one sample at a time, in one thread.

    Raises ConfigError for a run whose answers have no known meaning.
    """

    def __init__(self, run: Run, checkpoint: str, top_k: int) -> None:
        self._intake = intake_of(run)
        self.run = run
        self.top_k = top_k
        self._checkpoint = checkpoint
        self._trainer = run.trainer(checkpoint)
        self._predictor = Predictor(self._trainer)
        self._weights = ExitStack()

    @torch.inference_mode()
    def open(self) -> None:
        """Load the evaluated weights into the model until `close`, and run it once."""
        self._weights.enter_context(self._predictor.ready())
        with suppress(UploadError):  # the first answer takes many times as long as the others
            self(self._intake.example)

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
            "channels": facts.inputs.get("channels"),
            "example": None if self._pictures else self._intake.example.decode(),
            "top_k": min(self.top_k, facts.num_classes or self.top_k),
            "facts": {
                "model": f"{facts.model['_target_']}, {parameters:,} parameters",
                "data": str(data),
                "checkpoint": f"{origin['checkpoint']}, step {origin['step']}{weights}",
                **results,
                "classes": ", ".join(facts.classes or ()) or "not named",
                "input": self._intake.words,
                "versions": ", ".join(f"{k} {v}" for k, v in origin["versions"].items()),
            },
        }

    @torch.inference_mode()
    def __call__(self, data: bytes, top_k: int | None = None, show: bool = False) -> Row:
        """Return the row of `Run.predict` for the body of a request, and the time it took.

        show: with `input`, the picture that the network was given, and for a mask the classes in
        it. Raises UploadError for what is no sample, or none that the run can take.
        """
        if not data:
            raise UploadError(422, f"the request has no body: send {self._intake.words}")
        trainer = self._trainer
        began = time.perf_counter()
        seed = derived(trainer.options.seed, "predict")
        try:
            with rng.keyed(trainer.strategy.device, seed):  # each request draws as the first does
                asked = self._intake(data)
                ready = time.perf_counter()
                predictor = self._predictor
                if asked.generation is not None:
                    predictor = Predictor(trainer, generation=asked.generation)
                values, _ = predictor.ask(trainer.to_device(collate([asked.sample])), 1)
        except (DataError, ConfigError, ModelError) as error:
            raise UploadError(422, str(error)) from error
        ended = time.perf_counter()
        rows = Rows(
            self.run.facts,
            top_k or self.top_k,
            str,
            lambda _, mask: _mask_url(mask),
            lambda _: asked.prompt,
        )
        row = next(rows(Answers([0], values, None, {})))
        del row["file"]
        if show:
            row |= {"input": _shown(asked.sample)} if self._pictures else {}
            row |= self._areas(values)
        row["milliseconds"] = {"read": 1e3 * (ready - began), "model": 1e3 * (ended - ready)}
        return row

    @property
    def _pictures(self) -> bool:
        return isinstance(self._intake, PictureIntake)

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
