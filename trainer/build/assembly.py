"""The parts of an experiment, built from its nodes: for a run, or on stand-ins for its check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from conf.errors import Problem
from conf.reserved import fill
from conf.schema import Config
from trainer.build.nodes import build_named, build_node, with_classes
from trainer.callback import Callback, Saver
from trainer.errors import ModelError
from trainer.lr_schedulers.schedule import LRSchedule, build_lr_schedule
from trainer.optimizers.optimizers import Optimizers, build_optimizers
from trainer.strategies.strategy import Strategy
from trainer.task import Task, named_modules
from trainer.update.activation_checkpointing import checkpoint_modules, checkpoint_segments
from trainer.update.misfit import is_misfit
from trainer.update.precision import Precision


@dataclass(frozen=True, slots=True)
class Known:
    """Facts that are known once the data are open; None if they have no such fact."""

    num_classes: int | None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    guessed: bool = False  # placeholders of a check, which opens no data

    @property
    def lengths(self) -> dict[str, int]:
        """Values of the reserved interpolations."""
        lengths = {"total_steps": self.total_steps, "steps_per_epoch": self.steps_per_epoch}
        return {name: length for name, length in lengths.items() if length is not None}


@dataclass(frozen=True)
class Assembly:
    """The parts of a run; each is built once, at its first use.

    A run must use the model first, since parts draw random numbers. A mistake in a node raises
    ConfigError from the part that needs it.
    """

    config: Config
    known: Known
    strategy: Strategy
    precision: Precision

    @cached_property
    def model(self) -> nn.Module:
        """The model on its device, in its dtype."""
        model: nn.Module = self._bare_model()
        if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
            hint = "give its layer its sizes, or call it once"
            raise ModelError(Problem("model", f"{lazy[0]} is a lazy parameter", hint))
        if self.config.trainer.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return self.strategy.prepare(self.precision.convert(model))

    def _bare_model(self) -> Any:
        node = with_classes(self.config.model, self.known.num_classes)
        try:
            return build_node(node, "model")
        except Exception as error:
            if not _is_refusal(error):
                raise
            reason = " ".join(str(error).split())[:300]
            message = f"{node['_target_']} does not accept its arguments: {reason}"
            raise ModelError(Problem("model", message)) from error

    @cached_property
    def checkpointed(self) -> list[str]:
        """Names of the modules whose activations are recomputed in the backward pass."""
        options = self.config.trainer
        if options.activation_checkpointing_segments is not None:
            checkpoint_segments(self.model, options.activation_checkpointing_segments)
        return checkpoint_modules(self.model, options.activation_checkpointing or [])

    @cached_property
    def task(self) -> Task:
        """The task, moved to the device."""
        task: Task = build_node(with_classes(self.config.task, self.known.num_classes), "task")
        task.to(self.strategy.device, self.precision.dtype)
        return task

    @cached_property
    def optimizers(self) -> Optimizers:
        """The optimizers over the parameters of model and task."""
        # Reserved interpolations stay: an optimizer's own schedule fills them with what remains of
        # the run after its warm-up. A fused step skips a non-finite update in its kernel, so
        # that its state need not be copied.
        return build_optimizers(
            self.model,
            self.config.optimizer,
            prefer_fused=self.strategy.device.type == "cuda",
            others=named_modules(self.task),
        )

    @cached_property
    def schedule(self) -> LRSchedule:
        """The schedule of all optimizers' learning rates."""
        return build_lr_schedule(
            self.config.lr_scheduler,
            self.optimizers,
            self.known.total_steps,
            self.known.steps_per_epoch,
            guessed=self.known.guessed,
        )

    @cached_property
    def callbacks(self) -> dict[str, Callback]:
        """The callbacks, in the order of the configuration with two exceptions.

        Callbacks that average weights come first, and the one that saves checkpoints comes last.
        """
        built = build_named(fill(self.config.callbacks, self.known.lengths), "callbacks")
        kept = {name: callback for name, callback in built.items() if callback is not None}
        return dict(sorted(kept.items(), key=lambda pair: _turn(pair[1])))


def _turn(callback: Callback) -> int:
    return isinstance(callback, Saver) - callback.changes_weights


def _is_refusal(error: Exception) -> bool:
    """Return whether an exception is a layer's objection to an argument."""
    arithmetic = (RuntimeError, ArithmeticError, LookupError, AttributeError)
    return isinstance(error, arithmetic) and is_misfit(error)
