"""One optimizer's schedule: a warm-up, then a torch scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoints.plain import plain_part
from trainer.lr_schedulers.horizon import Interval
from trainer.lr_schedulers.warmup import Warmup
from trainer.metric_names import epoch_metric
from trainer.optimizers.state import type_name

# What torch's ReduceLROnPlateau has seen, as opposed to how it is set up.
_PLATEAU_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Lists in the states of torch's schedulers that have an entry for each parameter group.
_BY_GROUP = (
    "base_lrs",
    "_last_lr",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "lr_lambdas",
)


class StandIn(Optimizer):
    """An optimizer without parameters to try a schedule on."""

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        params = [{**group, "params": [nn.Parameter(torch.empty(0))]} for group in groups]
        super().__init__(params, dict(defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; schedulers want to see it done."""


class Track:
    """Move one optimizer's learning rates: up the warm-up, then as `scheduler` says.

    The warm-up ends at the scheduler's own first value, so it fits in front of any. While it
    lasts, the scheduler stands still: its steps, epochs and validations count from there.
    `settings` describes what the track was made from, `rebuild` makes it over another optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        interval: Interval = "step",
        warmup: Warmup | None = None,
        monitor: str | None = None,
        group_names: Sequence[str] = (),
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
        self.group_names = list(group_names) or [
            str(group.get("name", i)) for i, group in enumerate(optimizer.param_groups)
        ]
        self._tick = 0  # of the warm-up
        self._settled = not self.warmup.ticks  # an update has run with the scheduler's first value
        self._start = [float(group["lr"]) for group in optimizer.param_groups]
        if self.warmup.ticks:
            self.scale(self.warmup.factor(0))

    @property
    def watched(self) -> str | None:
        """The metric by the name that it has of a whole epoch or validation."""
        return None if self.monitor is None else epoch_metric(self.monitor)

    @property
    def warming(self) -> bool:
        """Whether the warm-up is not over."""
        return self._tick < self.warmup.ticks

    def after_update(self) -> None:
        """Follow an applied update."""
        if self.warming:
            if self.warmup.every == "step":
                self._warm()
            return
        if self.interval == "step" and self.monitor is None:
            self.scheduler.step()
        self._settled = True

    def after_epoch(self) -> None:
        """Follow the last update of an epoch."""
        if self.warming:
            if self.warmup.every == "epoch":
                self._warm()
        elif self.interval == "epoch" and self.monitor is None and self._settled:
            self.scheduler.step()

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Follow a validation, or an epoch's means, if it has measured what is monitored."""
        if self.watched is not None and self.watched in metrics and not self.warming:
            self.scheduler.step(metrics[self.watched])

    def _warm(self) -> None:
        self._tick += 1
        self.scale(self.warmup.factor(self._tick))

    def scale(self, factor: float) -> None:
        """Set the learning rates to a share of the scheduler's first ones."""
        for group, start in zip(self.optimizer.param_groups, self._start, strict=True):
            set_lr(group, start * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the scheduler's state, without functions."""
        return {
            "type": type_name(self.scheduler),
            "settings": self.settings,
            "groups": list(self.group_names),
            "tick": self._tick,
            "settled": self._settled,
            "scheduler": plain_part(self.scheduler.state_dict()),
            "start": list(self._start),
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
        }

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """List what is set up differently here than where `state` was saved."""
        if state["type"] != type_name(self.scheduler):
            return [f"it is {type_name(self.scheduler)}, it was {state['type']}"]
        there, here = state["settings"], self.settings
        found = [
            f"lr_scheduler.{key} is {here.get(key)!r}, it was {there.get(key)!r}"
            for key in [*here, *(key for key in there if key not in here)]
            if here.get(key) != there.get(key)
        ]
        new = [name for name in self.group_names if name not in state["groups"]]
        if new:
            found.append(f"group {new[0]!r} had no schedule")
        kept = [name for name in state["groups"] if name in self.group_names]
        if kept != self.group_names and not state["type"].startswith("torch."):
            found.append("the parameter groups are in another order")
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over position and state exactly; learning rates come with the optimizer's."""
        order = [state["groups"].index(name) for name in self.group_names]
        picked = _pick(state, len(state["groups"]), order)
        self._tick = picked["tick"]
        self._settled = picked["settled"]
        self._start = picked["start"]
        self.scheduler.load_state_dict(picked["scheduler"])

    def catch_up(
        self,
        state: Mapping[str, Any] | None,
        groups: Sequence[dict[str, Any]],
        pass_by: Callable[[Track], None],
    ) -> None:
        """Go to where `state` was, on the curve that is configured here.

        `groups` are the optimizer's configured hyper-parameters; `pass_by` lets the updates and
        epochs so far pass by a track. What a plateau scheduler has seen is taken over, and how
        far it has come down, in groups that began at the same learning rate.
        """
        if self.rebuild is None:
            if state is not None:
                self.load_state_dict(state)
            return
        stand_in = StandIn(groups, self.optimizer.defaults)
        twin = self.rebuild(stand_in)
        stand_in.step()
        pass_by(twin)
        reached = twin.state_dict()
        if state is not None and self.monitor is not None and state["type"] == reached["type"]:
            memory = {key: state["scheduler"][key] for key in _PLATEAU_MEMORY}
            reached["scheduler"].update(memory)
            twin._take_lr(state)
        self.load_state_dict(reached)
        for here, there, before in zip(
            self.optimizer.param_groups, stand_in.param_groups, groups, strict=True
        ):
            moved = {k: v for k, v in there.items() if k != "params" and v != before.get(k)}
            here.update({k: v for k, v in moved.items() if k != "lr"})
            set_lr(here, float(there["lr"]))

    def _take_lr(self, state: Mapping[str, Any]) -> None:
        then = dict(
            zip(state["groups"], zip(state["start"], state["lr"], strict=True), strict=True)
        )
        for name, start, group in zip(
            self.group_names, self._start, self.optimizer.param_groups, strict=True
        ):
            if name in then and then[name][0] == start and not self.warming:
                set_lr(group, then[name][1])


def _pick(value: Any, count: int, order: Sequence[int], key: str = "") -> Any:
    """Copy a state, with lists that go by group in the present order of the groups."""
    if isinstance(value, dict):
        return type(value)({k: _pick(v, count, order, str(k)) for k, v in value.items()})
    if isinstance(value, list) and key in (*_BY_GROUP, "start") and len(value) == count:
        return [value[i] for i in order]
    if isinstance(value, list):
        return [_pick(v, count, order) for v in value]
    return value


def set_lr(group: dict[str, Any], value: float) -> None:
    """Set a group's learning rate; one that is a tensor stays the same tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value
