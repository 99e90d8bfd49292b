"""Images and text that a model generates."""

from typing import Any

import torch
from torch import Tensor

from regimen.callbacks.pictures.picture import (
    ValidationPicture,
    class_names,
    code_block,
    is_picture,
    sheet,
)
from regimen.callbacks.support import check_finite, check_least, check_positive
from regimen.data.batch import inputs_of
from regimen.trainer.task import tensors_of
from regimen.trainer.trainer import Trainer


class GeneratedImages(ValidationPicture):
    """Show the images that a model returns, as a GAN's generator does, as `generated/val`.

    They are generated from the first inputs (the noise) of the validation, so that validations can
    be compared.
    """

    kinds = ("array",)

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first images."""
        if not self.kept and is_picture(output) and not _are_logits(batch, output):
            self.kept = [(output[: self.wanted].clone(),)]

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log the images."""
        trainer.log_image("generated/val", sheet(parts[0], columns=8))


def _are_logits(batch: Any, output: Tensor) -> bool:
    """Return whether a batch has a class for each pixel of the output, which then are no colors."""
    height_width = output.shape[2:]
    targets = list(tensors_of(batch))[1:]
    for target in targets:
        is_integer = not target.is_floating_point() and not target.is_complex()
        has_a_class_each = target.numel() == len(output) * height_width.numel()
        if is_integer and target.shape[-2:] == height_width and has_a_class_each:
            return True
    return False


class GeneratedText(ValidationPicture):
    """Log text that a language model generates, as `generated/text`.

    The first `prompt` tokens of the first samples of the validation are continued by `length`
    tokens, sampled at `temperature` with random states of their own, so that training does not
    change. Each token costs a forward pass. The names of the classes are their letters.
    """

    kinds = ("text", "array")
    on_main_only = False

    def __init__(
        self,
        count: int = 2,
        prompt: int = 16,
        length: int = 100,
        temperature: float = 0.8,
        every_n_validations: int | None = None,
    ) -> None:
        super().__init__(count, every_n_validations)
        check_least(prompt=prompt, length=length)
        check_positive(temperature=temperature)
        check_finite(temperature=temperature)
        self._prompt = prompt
        self._length = length
        self._temperature = temperature
        self._context = 0  # tokens that the model sees

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the first prompts, and the length of the context."""
        tokens = inputs_of(batch)
        if self.kept or not isinstance(tokens, Tensor) or not isinstance(output, Tensor):
            return
        if tokens.ndim == 2 and not tokens.is_floating_point() and output.ndim == 3:
            self.kept = [(tokens[: self.wanted, : self._prompt].clone(),)]
            self._context = tokens.shape[1]

    def finish(self, trainer: Trainer) -> None:
        """Generate the text on all processes, which a sharded model needs."""
        # Waits for the device, after a validation.
        prompts = [tokens.cpu() for (tokens,) in self.kept]
        # A collective: all processes continue the prompts of the main one.
        prompts, context = trainer.group.broadcast((prompts, self._context))
        if not prompts:
            return
        tokens = prompts[0].to(trainer.strategy.device)
        with trainer.evaluating(), trainer.precision.autocast():
            for _ in range(self._length):
                logits = trainer.task.prediction_step(trainer.model, tokens[:, -context:])
                probabilities = (logits[:, :, -1].float() / self._temperature).softmax(1)
                tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], 1)

        names = class_names(trainer, trainer.task.num_classes)  # type: ignore[attr-defined]
        separator = "" if all(len(name) == 1 for name in names) else " "
        texts = []
        # Waits for the device, after a validation.
        for row in tokens.tolist():
            texts.append(code_block(separator.join(names[token] for token in row)))
        trainer.log_text("generated/text", "\n\n---\n\n".join(texts))
