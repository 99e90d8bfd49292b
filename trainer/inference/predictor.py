"""The outputs of a trained model for the samples of a loader, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data.loading.on_device import OnDevice
from trainer import rng
from trainer.errors import ModelError
from trainer.inference.generation import Generation
from trainer.rng import derived
from trainer.trainer import Trainer
from trainer.update.misfit import MISFITS, misfit


@dataclass(frozen=True, slots=True)
class Answers:
    """The outputs for some samples on the host, of one process or gathered from all."""

    indices: Sequence[int]  # of the samples that were read
    values: Any  # what `Task.interpret` returned, [n, ...]
    kept: Tensor | None  # the values to save for each sample, [n, ...]
    broken: dict[int, str]  # samples that could not be read, and why


class Predictor:
    """Run a trainer's model with the weights that its run was evaluated with.

    keep: "logits", "probabilities", "embeddings:MODULE" (the output of a module of the model), or
    None: nothing but the outputs. generation: the outputs are new tokens after prompts.
    Raises ModelError if the model has no such module.
    """

    def __init__(
        self, trainer: Trainer, keep: str | None = None, generation: Generation | None = None
    ) -> None:
        self.trainer = trainer
        self._generation = generation
        self._keep = keep
        name = keep.partition(":")[2] if keep and keep.startswith("embeddings:") else None
        self._module = None if name is None else _module(trainer.model, name)
        self._embedding: Any = None

    @torch.inference_mode()
    def __call__(self, loader: OnDevice, start: int = 0) -> Iterator[Answers]:
        """Yield the outputs for each batch from number `start` on, gathered from all processes."""
        trainer = self.trainer
        group = trainer.group
        told = 0
        with self.ready():
            expected = loader.sampler.walk(0, start, len(loader))
            for whole, micro in zip(expected, loader.epoch(0, start), strict=True):
                indices = micro.piece.indices[: micro.piece.count]
                batch = trainer.to_device(micro.batch)
                values, kept = self.ask(batch, len(indices))
                broken = {s.index: s.reason for s in loader.skipped[told:]}
                told = len(loader.skipped)
                lost = set(whole.indices[: whole.count]) - set(indices)
                own = Answers(indices, values, kept, {i: broken[i] for i in lost})
                yield from group.gather(own)

    def ask(self, batch: Any, count: int) -> tuple[Any, Tensor | None]:
        """Return the outputs for the first `count` samples of a batch, and the values to keep."""
        task = self.trainer.task
        try:
            with self.trainer.precision.autocast():
                if self._generation is None:
                    output = task.prediction_step(self.trainer.model, batch)
                    values = task.interpret(output)
                else:
                    logits_of = partial(task.prediction_step, self.trainer.model)
                    output = values = self._generation(logits_of, batch)
        except MISFITS as error:
            if (known := misfit(error, batch, 0)) is not None:
                raise known from error
            raise
        if self._keep == "logits":
            kept = output
        elif self._keep == "probabilities":
            kept = values
        else:
            kept, self._embedding = self._embedding, None
        return _on_host(values, count), None if self._keep is None else _on_host(kept, count)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Use the evaluated weights, in evaluation mode; draws are keyed by the seed alone."""
        trainer = self.trainer
        with ExitStack() as stack:
            stack.enter_context(
                rng.keyed(trainer.strategy.device, derived(trainer.options.seed, "predict"))
            )
            stack.enter_context(trainer.evaluation_weights())
            trainer.model.eval()
            if self._module is not None:
                handle = self._module.register_forward_hook(self._embed)
                stack.callback(handle.remove)
            yield

    def _embed(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._embedding = output[0] if isinstance(output, (tuple, list)) else output


def _module(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        top = ", ".join(n for n in modules if n and "." not in n)
        raise ModelError(f"save=embeddings:{name}: the model has no such module; it has {top}")
    return modules[name]


def _on_host(value: Any, count: int) -> Any:
    if value is None:
        raise ModelError("save=embeddings: the model does not call that module in its forward")
    if not isinstance(value, Tensor):
        raise ModelError(
            f"the task's prediction_step returned {type(value).__name__}, not one tensor with an "
            "answer for each sample: give the task an `interpret` that makes one of it"
        )
    return value[:count].cpu()
