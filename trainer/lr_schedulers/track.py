"""One optimizer's schedule: a warm-up, then a torch scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer.checkpoints.plain import plain_part
from trainer.lr_schedulers.horizon import Interval
from trainer.lr_schedulers.tape import Change, Tape, put
from trainer.lr_schedulers.warmup import Warmup
from trainer.metric_names import epoch_metric
from trainer.optimizers.state import type_name

# What torch's ReduceLROnPlateau has seen, as opposed to how it is set up.
_PLATEAU_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Of its settings, those with an entry for each parameter group.
_BY_GROUP = ("min_lrs", "_last_lr", "base_lrs")


class Track:
    """Set an optimizer's hyper-parameters: up the warm-up, then as the scheduler's tape has them.

    The warm-up ends at the scheduler's own first value, so it fits in front of any; the scheduler's
    steps count from there. Where a track stands follows from the run's updates and epochs.

    Without a `tape` the scheduler is over the optimizer itself, is stepped there, and its state is
    saved: one that follows a metric (`monitor`), or an object of the user's, who may hold it.
    `settings` describes what the track was made from.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        interval: Interval = "step",
        monitor: str | None = None,
        warmup: Warmup | None = None,
        group_names: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        steps_per_epoch: int | None = None,
        tape: Tape | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.interval = interval
        self.monitor = monitor
        self.warmup = warmup or Warmup()
        self.settings = dict(settings or {})
        self.group_names = list(group_names) or [
            str(group.get("name", i)) for i, group in enumerate(optimizer.param_groups)
        ]
        self._tape = tape
        self._steps_per_epoch = steps_per_epoch
        # An epoch counts once an update has run with the scheduler's first value.
        self._warmup_epochs = self.warmup.epochs(steps_per_epoch)
        self._begins = self.warmup.ticks + 1 if self.warmup.ticks else 0  # the update after it
        self._at = self._position(0, 0)
        if tape is not None:
            self._write(tape.scheduled(0))
        self._start = [float(group["lr"]) for group in optimizer.param_groups]
        self._warm()

    @property
    def watched(self) -> str | None:
        """The metric by the name that it has of a whole epoch or validation."""
        return None if self.monitor is None else epoch_metric(self.monitor)

    def _position(self, updates: int, epochs: int) -> int:
        """Return how many steps of the scheduler are due; -n: the warm-up lasts n more."""
        ticks, by_step = self.warmup.ticks, self.interval == "step"
        if not ticks:
            return updates if by_step else epochs
        passed = (epochs if self.warmup.every == "epoch" else updates) - ticks
        return passed if by_step or passed <= 0 else epochs - self._warmup_epochs

    def after_update(self, updates: int, epochs: int) -> bool:
        """Follow an applied update; tell whether a hyper-parameter may have changed."""
        if updates == self._begins and self.warmup.every == "step":
            self._warmup_epochs = epochs
        return self.move(updates, epochs)

    def move(self, updates: int, epochs: int) -> bool:
        """Go to the next step, if one is due after so many updates and epochs."""
        position = self._position(updates, epochs)
        if position == self._at:
            return False
        self._at = position
        if position <= 0:
            self._warm()
        elif self._tape is not None:
            changes = self._tape.changes(position)
            self._write(changes)
            return bool(changes)
        elif self.monitor is None:
            self.scheduler.step()
        return position <= 0 or self.monitor is None

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Follow a validation, or an epoch's means, if it has measured what is monitored."""
        if self.watched is not None and self.watched in metrics and self._at >= 0:
            self.scheduler.step(metrics[self.watched])

    def _warm(self) -> None:
        """Set the learning rates to a share of the scheduler's first ones until it begins."""
        if self.warmup.ticks and self._at <= 0:
            factor = self.warmup.factor(self.warmup.ticks + self._at)
            self._write([(i, "lr", start * factor) for i, start in enumerate(self._start)])

    def _write(self, changes: Sequence[Change]) -> None:
        groups = self.optimizer.param_groups
        for index, key, value in changes:
            put(groups[index], key, value)

    def preview(self, step: int) -> list[float]:
        """Return each group's learning rate after `step` updates, if a metric always improves."""
        at = self._position(step, step // (self._steps_per_epoch or step + 1))
        if self._tape is not None and at > 0:
            return self._tape.preview(at)
        factor = self.warmup.factor(self.warmup.ticks + at)
        return [start * factor for start in self._start]

    def state_dict(self) -> dict[str, Any]:
        """Return what the track was made from, and a stepped scheduler's state: plain values."""
        state: dict[str, Any] = {
            "type": type_name(self.scheduler),
            "settings": self.settings,
            "groups": list(self.group_names),
            "warmup_epochs": self._warmup_epochs,
        }
        if self._tape is None:
            state["scheduler"] = plain_part(self.scheduler.state_dict())  # without functions
            state["start"] = list(self._start)
            state["lr"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        return state

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
        own = self.monitor is None or not state["type"].startswith("torch.")
        if self._tape is None and own and self.group_names != state["groups"]:
            found.append("the parameter groups are in another order, or not the same")
        return found

    def load_state_dict(self, state: Mapping[str, Any], updates: int, epochs: int) -> None:
        """Go on exactly where `state` was saved; hyper-parameters come with the optimizer's."""
        self._warmup_epochs = int(state.get("warmup_epochs", self._warmup_epochs))
        self._at = self._position(updates, epochs)
        if self._tape is None:
            order = [state["groups"].index(name) for name in self.group_names]
            self._start = [state["start"][i] for i in order]
            moved = {
                k: [v[i] for i in order] for k, v in state["scheduler"].items() if k in _BY_GROUP
            }
            self.scheduler.load_state_dict({**state["scheduler"], **moved})

    def catch_up(self, state: Mapping[str, Any] | None, updates: int, epochs: int) -> None:
        """Go to the same updates and epochs of the schedule that is configured here.

        `state` is that of the schedule before, if there was one. A plateau scheduler keeps what it
        has seen, and how far it came down; an object of the user's goes on exactly.
        """
        self._at = self._position(updates, epochs)
        if self._tape is not None:
            self._write(self._tape.scheduled(max(0, self._at)))
        elif self.monitor is not None and self.settings:
            self._keep(state or {"type": None})
        elif state is not None:
            self.load_state_dict(state, updates, epochs)
        if self._at < 0:
            self._warm()

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Keep a metric's history, and rates of groups that began at the same learning rate."""
        reached = {}
        if state["type"] == type_name(self.scheduler):
            memory = {key: state["scheduler"][key] for key in _PLATEAU_MEMORY}
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **memory})
            begun = zip(state["groups"], state["start"], strict=True)
            reached = dict(zip(begun, state["lr"], strict=True))
        begun = zip(self.group_names, self._start, strict=True)
        self._write([(i, "lr", reached.get(key, key[1])) for i, key in enumerate(begun)])
