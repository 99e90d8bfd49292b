"""Rules and schedules tried on a model that holds no data, before anything real is built (I9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trainer.lr_schedulers.schedule import build_lr_schedule
from trainer.optimizers.optimizers import Optimizers, build_optimizers
from trainer.optimizers.param_groups import ParamGroupError, complain

_TOTAL_STEPS, _STEPS_PER_EPOCH = 1000, 100  # stand-ins for what only the data tell


def check_optimization(
    model: nn.Module,
    optimizer: Mapping[str, Any],
    lr_scheduler: Mapping[str, Any] | None,
    others: Mapping[str, nn.Module] | None = None,
) -> None:
    """Build optimizers and schedules over `model`, which may be on the meta device, and `others`.

    Freezes what rules freeze. Raises `ParamGroupError` with all that is wrong in both.
    """
    complain(list(_problems(model, optimizer, lr_scheduler, others)))


def _problems(
    model: nn.Module,
    optimizer: Mapping[str, Any],
    lr_scheduler: Mapping[str, Any] | None,
    others: Mapping[str, nn.Module] | None,
) -> Iterator[str]:
    optimizers: Optimizers | None = None
    try:
        optimizers = build_optimizers(model, optimizer, others=others)
    except Exception as error:
        yield from _known(error)
    try:
        if optimizers is not None:
            build_lr_schedule(
                lr_scheduler, optimizers, _TOTAL_STEPS, _STEPS_PER_EPOCH, guessed=True
            )
    except Exception as error:
        yield from _known(error)


def _known(error: Exception) -> list[str]:
    """Return the problems of an error in the config; let any other pass."""
    if getattr(error, "exit_code", None) != ParamGroupError.exit_code:
        raise error
    return [str(problem) for problem in error.args]
