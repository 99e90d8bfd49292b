"""The schedule of one optimizer: a warm-up, then a torch scheduler."""

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

# The state of torch's ReduceLROnPlateau, in contrast to its settings.
_PLATEAU_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Its settings with an entry for each parameter group.
_BY_GROUP = ("min_lrs", "_last_lr", "base_lrs")


class Track:
    """Set an optimizer's hyper-parameters: by the warm-up, then from the scheduler's tape.

    The warm-up ends at the scheduler's first value, so it can precede any scheduler; the
    scheduler's steps start after it. The position of a track follows from the run's updates and
    epochs.

    Without a `tape` the scheduler is built over the optimizer itself, is stepped, and its state is
    saved. This applies to schedulers with a metric (`monitor`) and to objects of the user.
    `settings` are the arguments that the track was built from.
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
        # An epoch is counted after an update with the scheduler's first value.
        self._warmup_epochs = self.warmup.epochs(steps_per_epoch)
        self._begins = self.warmup.ticks + 1 if self.warmup.ticks else 0  # the update after it
        self._at = self._position(0, 0)
        if tape is not None:
            self._write(tape.scheduled(0))
        self._start = [float(group["lr"]) for group in optimizer.param_groups]
        self._warm()

    @property
    def watched(self) -> str | None:
        """The monitored metric, by its name for a whole epoch or a validation."""
        return None if self.monitor is None else epoch_metric(self.monitor)

    def _position(self, updates: int, epochs: int) -> int:
        """Return the scheduler's steps so far; -n if the warm-up has n ticks left."""
        ticks, by_step = self.warmup.ticks, self.interval == "step"
        if not ticks:
            return updates if by_step else epochs
        passed = (epochs if self.warmup.every == "epoch" else updates) - ticks
        return passed if by_step or passed <= 0 else epochs - self._warmup_epochs

    def after_update(self, updates: int, epochs: int) -> bool:
        """Step after an applied update; return whether a hyper-parameter may have changed."""
        if updates == self._begins and self.warmup.every == "step":
            self._warmup_epochs = epochs
        return self.move(updates, epochs)

    def move(self, updates: int, epochs: int) -> bool:
        """Take the next step, if it is due after this number of updates and epochs."""
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
        """Step the scheduler if the metrics contain the monitored one."""
        if self.watched is not None and self.watched in metrics and self._at >= 0:
            self.scheduler.step(metrics[self.watched])

    def _warm(self) -> None:
        """During the warm-up, set the learning rates to a fraction of the scheduler's first."""
        if self.warmup.ticks and self._at <= 0:
            factor = self.warmup.factor(self.warmup.ticks + self._at)
            self._write([(i, "lr", start * factor) for i, start in enumerate(self._start)])

    def _write(self, changes: Sequence[Change]) -> None:
        groups = self.optimizer.param_groups
        for index, key, value in changes:
            put(groups[index], key, value)

    def preview(self, step: int) -> list[float]:
        """Return each group's learning rate after `step` updates, if the metric always improves."""
        at = self._position(step, step // (self._steps_per_epoch or step + 1))
        if self._tape is not None and at > 0:
            return self._tape.preview(at)
        factor = self.warmup.factor(self.warmup.ticks + at)
        return [start * factor for start in self._start]

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and the state of a scheduler without a tape: plain values."""
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
        """Return the settings that differ from those of `state`."""
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
            found.append("the parameter groups, or their order, have changed")
        return found

    def load_state_dict(self, state: Mapping[str, Any], updates: int, epochs: int) -> None:
        """Restore `state` exactly; the optimizer's state has the hyper-parameters."""
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
        """Move to the same updates and epochs in the schedule that is configured here.

        `state` is that of the earlier schedule, if there was one. A plateau scheduler keeps its
        history and its reduced rates; an object of the user is restored exactly.
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
        """Keep the history of the metric, and the rates of groups with the same initial rate."""
        reached = {}
        if state["type"] == type_name(self.scheduler):
            memory = {key: state["scheduler"][key] for key in _PLATEAU_MEMORY}
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **memory})
            begun = zip(state["groups"], state["start"], strict=True)
            reached = dict(zip(begun, state["lr"], strict=True))
        begun = zip(self.group_names, self._start, strict=True)
        self._write([(i, "lr", reached.get(key, key[1])) for i, key in enumerate(begun)])
