"""Images and text that a model generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callbacks.support.drawing import is_picture, pixels, sheet
from callbacks.support.errors import CallbackError
from callbacks.support.watching import KeptSamples, class_names, code_block
from data.batch import inputs_of

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class GeneratedImages(KeptSamples):
    """Show the images that a model returns, as a GAN's generator does, as `generated/val`.

    They are generated from the first inputs (the noise) of the validation, so that validations can
    be compared.
    """

    def __init__(self, count: int = 32, every_n_validations: int | None = None) -> None:
        super().__init__(count, every_n_validations)

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task's outputs may be images."""
        return trainer.is_main and trainer.task.output_kind == "array"

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images."""
        if self._kept is None and is_picture(output):
            self._kept = output[: self._wanted].clone()

    def show(self, trainer: Trainer) -> None:
        """Log the images."""
        if self._kept is not None:
            trainer.log_image("generated/val", sheet(pixels(self._kept)))


class GeneratedText(KeptSamples):
    """Log text that a language model generates, as `generated/text`.

    The first `prompt` tokens of the first samples of the validation are continued by `length`
    tokens, sampled at `temperature` with random states of their own, so that training does not
    change. Each token costs a forward pass. The names of the classes are their letters.
    """

    def __init__(
        self,
        count: int = 2,
        prompt: int = 16,
        length: int = 100,
        temperature: float = 0.8,
        every_n_validations: int | None = None,
    ) -> None:
        super().__init__(count, every_n_validations)
        if min(prompt, length) < 1 or not temperature > 0:
            raise CallbackError(
                f"count={count}, prompt={prompt}, length={length}, temperature={temperature}: "
                "choose at least 1, and a temperature above 0"
            )
        self._prompt, self._length = prompt, length
        self._temperature = temperature
        self._context = 0

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task may predict tokens; `collect` checks the batches."""
        return trainer.task.output_kind in ("text", "array")

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first prompts."""
        if self._kept is None and _is_tokens(batch, output):
            self._context = batch[0].shape[1]
            self._kept = batch[0][: self._wanted, : self._prompt].clone()

    def show(self, trainer: Trainer) -> None:
        """Generate the text on all processes, which a sharded model needs."""
        kept = None if self._kept is None else (self._kept.cpu(), self._context)
        asked = trainer.group.broadcast(kept)
        if asked is None:
            return
        prompt, context = asked
        with trainer.evaluating(), trainer.precision.autocast():
            tokens = self._continued(trainer, prompt.to(trainer.strategy.device), context)
        names = class_names(trainer, trainer.task.num_classes)  # type: ignore[attr-defined]
        between = "" if all(len(name) == 1 for name in names) else " "
        texts = [between.join(names[i] for i in row) for row in tokens.tolist()]
        trainer.log_text("generated/text", "\n\n---\n\n".join(map(code_block, texts)))

    def _continued(self, trainer: Trainer, tokens: Tensor, context: int) -> Tensor:
        for _ in range(self._length):
            logits = trainer.task.prediction_step(trainer.model, tokens[:, -context:])
            likely = (logits[:, :, -1].float() / self._temperature).softmax(1)
            tokens = torch.cat([tokens, torch.multinomial(likely, 1)], 1)
        return tokens


def _is_tokens(batch: Any, output: Any) -> bool:
    """Return whether a batch has tokens [n, length], and the output is [n, vocabulary, length]."""
    tokens = inputs_of(batch)
    whole = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    return whole and isinstance(output, Tensor) and output.ndim == 3
