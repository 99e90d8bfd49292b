"""One optimizer's schedule: a warm-up, then a torch scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.optimizer_state import type_name
from trainer.plain import plain_part
from trainer.warmup import Warmup

Interval = Literal["step", "epoch"]
# What torch's ReduceLROnPlateau has seen, as opposed to how it is set up.
_PLATEAU_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class StandIn(Optimizer):
    """An optimizer without parameters to try a schedule on."""

    def __init__(self, groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        params = [{**group, "params": [nn.Parameter(torch.empty(0))]} for group in groups]
        super().__init__(params, dict(defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; schedulers want to see it done."""


class Track:
    """Move one optimizer's learning rates: up the warm-up, then as `scheduler` says.

    The warm-up ends at the scheduler's own first value, so it fits in front of any. While it
    lasts, the scheduler stands still: its steps, epochs and validations count from there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        interval: Interval = "step",
        warmup: Warmup | None = None,
        monitor: str | None = None,
        settings: Mapping[str, Any] | None = None,
        rebuild: Callable[[Optimizer], Track] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.interval = interval
        self.warmup = warmup or Warmup()
        self.monitor = monitor
        self.settings = dict(settings or {})
        self.rebuild = rebuild
        self._tick = 0  # of the warm-up
        self._settled = not self.warmup.ticks  # an update has run with the scheduler's first value
        self._start = [float(group["lr"]) for group in optimizer.param_groups]
        if self.warmup.ticks:
            self._scale(self.warmup.factor(0))

    @property
    def _warming(self) -> bool:
        return self._tick < self.warmup.ticks

    def after_update(self) -> None:
        """Follow an applied update."""
        if self._warming:
            if self.warmup.every == "step":
                self._warm()
            return
        if self.interval == "step" and self.monitor is None:
            self.scheduler.step()
        self._settled = True

    def after_epoch(self) -> None:
        """Follow the last update of an epoch."""
        if self._warming:
            if self.warmup.every == "epoch":
                self._warm()
        elif self.interval == "epoch" and self.monitor is None and self._settled:
            self.scheduler.step()

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Follow a validation, if it has measured what is monitored."""
        if self.monitor is not None and self.monitor in metrics and not self._warming:
            self.scheduler.step(metrics[self.monitor])

    def _warm(self) -> None:
        self._tick += 1
        self._scale(self.warmup.factor(self._tick))

    def _scale(self, factor: float) -> None:
        for group, start in zip(self.optimizer.param_groups, self._start, strict=True):
            set_lr(group, start * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the scheduler's state, without functions."""
        return {
            "type": type_name(self.scheduler),
            "settings": self.settings,
            "tick": self._tick,
            "settled": self._settled,
            "scheduler": plain_part(self.scheduler.state_dict()),
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
            "start": list(self._start),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over position and state exactly; learning rates come with the optimizer's."""
        self._tick = state["tick"]
        self._settled = state["settled"]
        self._start = list(state["start"])
        # torch's own loading writes into what it is given.
        self.scheduler.load_state_dict(dict(state["scheduler"]))

    def catch_up(self, state: Mapping[str, Any], groups: list[dict[str, Any]], run: Any) -> None:
        """Go to where `state` was, on this configuration's own curve.

        `groups` are the optimizer's configured hyper-parameters; `run` makes a track pass the
        updates and epochs so far. What a plateau scheduler has seen is taken over, and how far
        it has come down if it began at the same learning rate.
        """
        if self.rebuild is None:
            self.load_state_dict(state)
            return
        stand_in = StandIn(groups, self.optimizer.defaults)
        twin = self.rebuild(stand_in)
        stand_in.step()
        run(twin)
        reached = twin.state_dict()
        if self.monitor is not None and state["type"] == reached["type"]:
            memory = {key: state["scheduler"][key] for key in _PLATEAU_MEMORY}
            reached["scheduler"].update(memory)
            if state["start"] == reached["start"] and not twin._warming:
                for group, lr in zip(stand_in.param_groups, state["lr"], strict=True):
                    set_lr(group, lr)
        self.load_state_dict(reached)
        for group, other, before in zip(
            self.optimizer.param_groups, stand_in.param_groups, groups, strict=True
        ):
            changed = {k: v for k, v in other.items() if k != "params" and v != before.get(k)}
            group.update(changed)
            set_lr(group, float(other["lr"]))


def set_lr(group: dict[str, Any], value: float) -> None:
    """Set a group's learning rate; one that is a tensor stays the same tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value
