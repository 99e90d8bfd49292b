"""Where a schedule stands at any step, without walking there."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from trainer.lr_schedulers.track import Track, set_lr

_BY_FORMULA = (LambdaLR, OneCycleLR, CyclicLR)  # compute from `last_epoch` alone


def jump(track: Track, step: int, steps_per_epoch: int | None) -> bool:
    """Set a track's learning rates as after `step` updates, if there is a formula for them.

    Nothing but the learning rates is right afterwards: a track that jumps must not walk.
    """
    warmup, epochs = track.warmup, step // (steps_per_epoch or step + 1)
    passed = epochs if warmup.every == "epoch" else step
    track.scale(warmup.factor(passed))
    if passed < warmup.ticks:
        return True
    if track.interval == "step":
        return _jump(track.scheduler, step - warmup.ticks)
    # Of epochs that a warm-up in updates touches, none is counted.
    lost = warmup.ticks if warmup.every == "epoch" else warmup.ticks // (steps_per_epoch or 1)
    return _jump(track.scheduler, epochs - lost)


def _jump(scheduler: Any, step: int) -> bool:
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    if type(scheduler) is SequentialLR:
        part = bisect_right(scheduler._milestones, step)
        begin = scheduler._milestones[part - 1] if part else 0
        return _jump(scheduler._schedulers[part], step - begin)
    if type(scheduler) is CosineAnnealingWarmRestarts:
        scheduler.step(step)
        return True
    if type(scheduler) in _BY_FORMULA:
        scheduler.last_epoch = step - 1
        scheduler.step()
        return True
    formula = getattr(scheduler, "_get_closed_form_lr", None)
    if formula is None or type(scheduler).__module__ != "torch.optim.lr_scheduler":
        return False
    scheduler.last_epoch = step
    for group, lr in zip(scheduler.optimizer.param_groups, formula(), strict=True):
        set_lr(group, float(lr))
    return True
