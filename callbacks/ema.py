"""The base class of averages of the weights, and the exponential moving average."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from regimen.callbacks.support import check_least, require
from regimen.trainer.callback import Average
from regimen.trainer.trainer import Trainer

Rule = Callable[[Any, Any, int], None]  # torch's `multi_avg_fn`: averages, weights, their number


class RunningAverage(Average):
    """Base class of callbacks that keep an average of a model's parameters.

    Floating-point buffers (BatchNorm's statistics) are averaged as well if `use_buffers`, and
    copied otherwise, as integer buffers always are. torch's `AveragedModel` computes the same, but
    reads its counter from the device at every update; here the host never waits.
    """

    def __init__(self, use_for_evaluation: bool = True, use_buffers: bool = True) -> None:
        self.used_for_evaluation = use_for_evaluation
        self._use_buffers = use_buffers
        self._loaded: Mapping[str, Tensor] = {}
        self._tensors = dict[str, Tensor]()  # the average, by name; empty before `begin`
        self._averaged = list[tuple[Tensor, Tensor]]()  # pairs of average and the model's tensor
        self._copied = list[tuple[Tensor, Tensor]]()

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Start from a loaded average or from the model's weights; later calls do nothing."""
        if self._tensors:
            return
        averages = dict[int, Tensor]()  # by id: tied weights have several names and one average
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            average = averages.get(id(tensor))
            if average is None:
                # The strategy has sharded a loaded average as it shards the parameters.
                start = self._loaded.get(name, tensor.detach())
                average = start.to(tensor, copy=True)
                averages[id(tensor)] = average
                follows = isinstance(tensor, nn.Parameter) or self._use_buffers
                if follows and (tensor.is_floating_point() or tensor.is_complex()):
                    self._averaged.append((average, tensor))
                else:
                    self._copied.append((average, tensor))
            self._tensors[name] = average
        self._loaded = {}

    @torch.no_grad()
    def update(self, rule: Rule, count: int = 0) -> None:
        """Move the average towards the model's weights by one of torch's rules."""
        averages = [_local_part(average) for average, _ in self._averaged]
        weights = [_local_part(weight) for _, weight in self._averaged]
        rule(averages, weights, count)
        self.take_buffers()

    def take_buffers(self) -> None:
        """Copy the model's buffers that are not averaged."""
        _copy((buffer, average) for average, buffer in self._copied)

    @contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[None]:
        """Copy the average into the model within the context; do nothing without an average.

        The tensors of the model stay the same objects, which wrappers, compiled graphs and
        optimizers refer to.
        """
        if self._loaded:
            self.begin(model)
        pairs = self._averaged + self._copied
        backups = [(tensor.detach().clone(), tensor) for _, tensor in pairs]
        _copy(pairs)
        try:
            yield
        finally:
            _copy(backups)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start from the model's weights, or continue a loaded average."""
        self.begin(trainer.model)

    def swap(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which the model has the average's weights, once there is one."""
        if self.begun:
            return self.exchanged(model)
        return nullcontext()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the average's tensors themselves, sharded as the model is."""
        return dict(self._tensors or self._loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return the average as a state dict of the model, and what a subclass keeps."""
        return {"model": dict(self.tensors()), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an average, to be used by `begin`."""
        super().load_state_dict(state)
        self._loaded = dict(state["model"])
        self._tensors = {}
        self._averaged = []
        self._copied = []


@dataclass(eq=False)
class EMA(RunningAverage):
    """Keep `average = decay * average + (1 - decay) * weights`, after every applied update.

    `warmup`: the decay of step n is at most (1 + n) / (10 + n), so that the first weights do not
    dominate the average of a short run. `use_buffers`: average BatchNorm's statistics too, instead
    of copying them. `use_for_evaluation`: validation and test, and so the choice of the best
    checkpoint, use the average; training never does. A checkpoint holds both `model` and `ema`.
    `start_epoch`: in the epochs before it the average is a copy of the weights.
    `batch_size`, `epochs`: those of the run, together or not at all. With them the decay is
    1 - (1 - decay) * batch_size * update_every / epochs, at least 0, as torchvision's references
    for classification compute it: the average covers the same share of any run on one data set.
    """

    decay: float = 0.999
    warmup: bool = True
    update_every: int = 1
    use_buffers: bool = True
    use_for_evaluation: bool = True
    start_epoch: int = 0
    batch_size: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.use_for_evaluation, self.use_buffers)
        require(0 <= self.decay < 1, f"decay={self.decay}: choose at least 0 and less than 1")
        check_least(update_every=self.update_every, batch_size=self.batch_size, epochs=self.epochs)
        check_least(0, start_epoch=self.start_epoch)
        self._decay = self.decay
        if self.batch_size is not None and self.epochs is not None:
            share = self.batch_size * self.update_every / self.epochs
            self._decay = max(0.0, 1 - (1 - self.decay) * share)
        else:
            require(
                self.batch_size is self.epochs,  # both are null
                f"batch_size={self.batch_size}, epochs={self.epochs}: the decay is scaled by both, "
                "give the other one, or set both to null",
            )

    def on_update_end(self, trainer: Trainer) -> None:
        """Update the average, unless the update was skipped.

        An update that a GPU skipped changes no weights, and ends the run before the average is
        used.
        """
        step = trainer.state.global_step
        if trainer.state.skipped_in_a_row or step % self.update_every != 0:
            self.take_buffers()  # these change in every update
            return
        decay = self._decay
        if self.warmup:
            decay = min(decay, (1 + step) / (10 + step))
        if trainer.state.epoch < self.start_epoch:
            decay = 0.0
        self.update(get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


def _local_part(tensor: Any) -> Tensor:
    """Return the shard of this process, or the whole tensor if it is not sharded."""
    detached: Tensor = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


@torch.no_grad()
def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the first tensor of each pair into the second."""
    for source, target in pairs:
        target.copy_(source)
