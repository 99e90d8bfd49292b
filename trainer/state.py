"""Progress of a run: counters that are saved with every checkpoint, and where its time goes."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

MAX_TIME = "max_time"  # the reason of a run that stopped at its time limit
PRUNED = "pruning"  # the reason of a run that its search ended early
# Words in the names of metrics whose smaller values are better, and whose larger.
_SMALLER = {"loss", "error", "perplexity", "mae", "mse", "rmse", "nll", "wer", "cer"}
_LARGER = {"accuracy", "acc", "precision", "recall", "f1", "auc", "auroc", "map", "r2"}
_LARGER |= {"iou", "miou", "dice"}
# Of this process alone: a checkpoint lacks them, so that a stop ends no resumed run.
_NOT_SAVED = ("stop_reason", "stop_code", "requested", "signal", "resumed", "branched")


class LogPoint(NamedTuple):
    """Where logged values stand: the applied updates and completed epochs of their weights."""

    step: int
    epoch: int


def epoch_metric(name: str) -> str:
    """Return the name by which a metric is known of a whole epoch: `train/epoch_loss` of a loss.

    `train/loss` itself is the mean since the last log line, which says little of an epoch.
    """
    stage, slash, metric = name.partition("/")
    if stage == "train" and slash and not metric.startswith("epoch_"):
        return f"train/epoch_{metric}"
    return name


def monitored_names(metrics: Sequence[str], stages: Iterable[str]) -> list[str]:
    """Return what a callback or a schedule may monitor, of a task's metrics on each stage."""
    names = [f"{stage}/{name}" for stage in (*stages, "train") for name in metrics]
    names.append("train/grad_norm")
    names += [epoch_metric(name) for name in names if name.startswith("train/")]
    return names


def direction_of(name: str, modes: Mapping[str, str]) -> str | None:
    """Return "min" or "max": which values of a logged metric, such as val/accuracy, are better.

    `modes`: what the task says of its own metrics, by their names without the stage. Of any other
    metric the last known word behind the last slash decides; a term of the loss (`loss_<term>`)
    falls. None if no word is known.
    """
    for key, mode in modes.items():
        if f"/{name}".endswith((f"/{key}", f"/epoch_{key}")):
            return mode
    metric = name.rpartition("/")[2].lower().removeprefix("epoch_")
    if metric.startswith("loss_"):  # what a term is made of may rise: loss_dice
        return "min"
    for word in reversed(re.findall(r"f1|r2|[a-z]+", metric)):
        if word in _LARGER:
            return "max"
        if word in _SMALLER:
            return "min"
    return None


@dataclass(slots=True)
class TrainState:
    """Count the progress of a run; a *step* is an optimizer update that was applied.

    `updates` counts the batches consumed, `skipped_updates` those of them whose gradient was not
    finite, so that `updates == global_step + skipped_updates`.
    """

    epoch: int = 0  # epochs completed
    position: int = 0  # updates consumed in the current epoch
    epoch_samples: int = 0  # and samples: the place where a run with another batch size goes on
    global_step: int = 0  # updates applied
    updates: int = 0  # updates consumed over all epochs
    skipped_updates: int = 0  # updates not applied: their gradient was not finite
    skipped_in_a_row: int = 0
    micro_batches: int = 0
    samples: int = 0  # samples consumed, over all devices
    # Values of `global_step` at which the parts of a boundary were last done. The run that resumes
    # an interrupted boundary finishes it and repeats no part of it.
    logged_at: int = 0
    validated_at: int = 0
    stop_reason: str | None = None  # why the run ends, once all processes have agreed on it
    stop_code: int = 0  # the exit code that goes with it: 0, or 128 + a signal's number
    # The stop that this process alone asks for: reason and code. A signal can arrive at any moment,
    # so its handler writes to a field of its own.
    requested: tuple[str, int] | None = None
    signal: tuple[str, int] | None = None
    # Whether a checkpoint was loaded, and with other hyper-parameters than it was saved with.
    resumed: bool = field(default=False, compare=False)
    branched: bool = field(default=False, compare=False)

    def count(self, micro_batches: int, samples: int, applied: bool) -> None:
        """Count an update; `Updater.count_skipped` counts those that were not applied."""
        self.updates += 1
        self.position += 1
        self.epoch_samples += samples
        self.micro_batches += micro_batches
        self.samples += samples
        if applied:
            self.global_step += 1
            self.skipped_in_a_row = 0

    @property
    def where(self) -> str:
        """Epoch and step, as messages tell them."""
        return f"epoch {self.epoch}, step {self.global_step}"

    @property
    def interrupted(self) -> bool:
        """Whether a signal or the time limit ended the run, so that another run continues it."""
        return bool(self.stop_code) or self.stop_reason == MAX_TIME

    @property
    def pruned(self) -> bool:
        """Whether the search that the run belongs to ended it early."""
        return self.stop_reason == PRUNED

    def request_stop(self, reason: str, code: int = 0) -> None:
        """Ask to end the run after this update; the first reason stays, unless a signal follows."""
        if self.requested is None or (code and not self.requested[1]):
            self.requested = (reason, code)

    @property
    def stop_request(self) -> tuple[str, int] | None:
        """The stop that this process asks for and that is not agreed on yet: reason and code."""
        request = self.signal or self.requested
        if self.stop_code:
            return None
        if self.stop_reason is not None and (request is None or not request[1]):
            return None  # only a signal takes the place of another reason
        return request

    def apply_stop(self) -> None:
        """Stop the run at this process's own request, where there is no other process."""
        if self.stop_request is not None:
            self.stop(*self.stop_request)

    def stop(self, reason: str, code: int = 0) -> None:
        """End the run: all processes have agreed."""
        self.stop_reason, self.stop_code = reason, code

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values; a stop is not carried into the next run."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of `state`."""
        for name in self.state_dict():
            setattr(self, name, state.get(name, 0))  # earlier checkpoints have no `epoch_samples`


Training = Literal["data", "forward + backward", "optimizer", "callbacks"]
Pause = Literal["evaluation", "checkpoints", "start and end"]
Kind = Training | Pause
_TRAINING: tuple[Training, ...] = get_args(Training)
KINDS: tuple[Kind, ...] = (*_TRAINING, *get_args(Pause))


class Timer:
    """Attribute each second of a run to one kind of work.

    The device is not synchronized: the time of a GPU is counted where the host waits for it.
    """

    def __init__(self) -> None:
        self._kind: Kind = "callbacks"  # of the time that no `lap` counts
        self.start()

    def start(self) -> None:
        """Start the clock; earlier time is not counted."""
        self.spent: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._last = perf_counter()
        self.reset()

    def lap(self, kind: Kind) -> None:
        """Add the time since the last call to `kind`."""
        now = perf_counter()
        self.spent[kind] += now - self._last
        self._last = now

    @contextmanager
    def spending(self, kind: Kind) -> Iterator[None]:
        """Add the time of the context to `kind`, except that of nested contexts."""
        outer = self._kind
        self.lap(outer)
        self._kind = kind
        try:
            yield
        finally:
            self.lap(kind)
            self._kind = outer

    def reset(self) -> None:
        """Begin a new interval for `total` and `data`."""
        self._before = dict(self.spent)

    @property
    def seconds(self) -> float:
        """Seconds since `start`."""
        self.lap(self._kind)
        return sum(self.spent.values())

    @property
    def total(self) -> float:
        """Seconds of training in the interval, waiting for data included."""
        self.lap(self._kind)
        return sum(self.spent[kind] - self._before[kind] for kind in _TRAINING)

    @property
    def data(self) -> float:
        """Seconds of the interval spent waiting for the next batch."""
        return self.spent["data"] - self._before["data"]
