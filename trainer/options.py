"""How far and how often a trainer goes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Clipping:
    """Say how gradients are bounded before a step; None: not at all."""

    norm: float | None = None
    norm_type: float = 2.0
    per_group: bool = False  # bound the norm of each parameter group by itself
    value: float | None = None


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Gaussian noise of variance `eta / (1 + update)**gamma` (Neelakantan et al. 2015).

    It is a function of seed and update alone: the same after a resume, and on every process.
    """

    eta: float
    gamma: float
    seed: int

    def std(self, update: int) -> float:
        """Return the standard deviation at an update, counted from 0."""
        return math.sqrt(self.eta / (1 + update) ** self.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Bound and pace a run; the config's `trainer` group, resolved to plain values.

    `clipping` and `gradient_noise` may also be given as in a configuration: `clip_grad_norm`,
    `clip_grad_norm_type`, `clip_grad_per_group` and `clip_grad_value`; `{"eta": .., "gamma": ..}`.
    """

    seed: int = 0  # of what a model or task draws in evaluation
    max_epochs: int | None = 1
    max_steps: int | None = None  # applied updates
    max_time: float | None = None  # seconds
    gradient_accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_norm_type: float = 2.0
    clip_grad_per_group: bool = False
    clip_grad_value: float | None = None
    clipping: Clipping = field(default=None)  # type: ignore[assignment]
    gradient_noise: GradientNoise | None = None  # added after clipping
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped_in_a_row: int = 20
    log_every_n_steps: int = 50
    validate_every_n_epochs: int | None = 1
    validate_every_n_steps: int | None = None
    limit_train_batches: int | None = None  # updates of each epoch
    limit_val_batches: int | None = None
    validate_at_start: int = 0  # validation batches tried before training, to fail early
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Fill `clipping` and `gradient_noise` from what a configuration calls them."""
        if self.clipping is None:
            clipping = Clipping(
                self.clip_grad_norm,
                self.clip_grad_norm_type,
                self.clip_grad_per_group,
                self.clip_grad_value,
            )
            object.__setattr__(self, "clipping", clipping)
        if isinstance(self.gradient_noise, Mapping):
            noise = GradientNoise(**{"seed": self.seed, **self.gradient_noise})
            object.__setattr__(self, "gradient_noise", noise)

    @property
    def validates(self) -> bool:
        """Whether there are validations before the very end."""
        return not (self.validate_every_n_epochs is None and self.validate_every_n_steps is None)


def horizon(
    max_epochs: int | None, max_steps: int | None, steps_per_epoch: int | None
) -> int | None:
    """Return the number of updates of a run; None if only the time ends it."""
    ends = [max_steps] if max_steps is not None else []
    if max_epochs is not None and steps_per_epoch is not None:
        ends.append(max_epochs * steps_per_epoch)
    return min(ends, default=None)
