"""What a run is: its model's graph, the norms of its layers, its configuration as text."""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
    EventFileLoader,
)
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from callbacks.pictures.picture import code_block
from callbacks.support import CallbackError, check_least
from callbacks.tensorboard import TensorBoard
from data.batch import MicroBatch, inputs_of
from trainer.callback import Callback
from trainer.runs.directory import CONFIG, OVERRIDES
from trainer.trainer import Trainer

PLAN = "plan.txt"
Named = dict[str, Tensor]
_log = logging.getLogger(__name__)


class Graph(Callback):
    """Write the graph of the model, traced with the first sample, once.

    It needs the TensorBoard callback: no other tool shows graphs. A model that cannot be traced is
    a warning.
    """

    takes_shards = False

    def __init__(self) -> None:
        self._inputs: Any = None
        self._boards: list[TensorBoard] = []

    def setup(self, trainer: Trainer) -> None:
        """Find the TensorBoard callback. Raises CallbackError if there is none."""
        self._boards = [c for c in trainer.callbacks.values() if isinstance(c, TensorBoard)]
        if not self._boards:
            raise CallbackError(f"callbacks.{self.name} needs callbacks.tensorboard")

    def on_update_start(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        """Keep the first sample of the run."""
        if not trainer.state.updates and trainer.is_main:
            self._inputs = inputs_of(micro_batches[0].batch)[:1].clone()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Trace the model at the first log line."""
        if self._inputs is None:
            return
        inputs, self._inputs = self._inputs, None
        modes = [(module, module.training) for module in trainer.model.modules()]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # torch's tracer warns about values that it treats as constants
            warnings.simplefilter("ignore")
            try:
                with SummaryWriter(folder) as writer:
                    writer.add_graph(trainer.model, (inputs,))
                (path,) = Path(folder).iterdir()
                graphs = [event.graph_def for event in EventFileLoader(str(path)).Load()]
                self._boards[0].write_graph(max(graphs, key=len))
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                _log.warning("callbacks.%s: the model cannot be traced: %s", self.name, reason)
            finally:
                for module, mode in modes:
                    module.training = mode


class LayerStatistics(Callback):
    """Log `grad_norm/<layer>` and `update_ratio/<layer>` every `every_n_steps` steps.

    The norm is that of the clipped gradient. The ratio is the norm of the change in an update over
    the norm of the weights before: about 1e-3 is usual. The weights are copied for it in that
    update. The values are in the next log line, so choose a multiple of trainer.log_every_n_steps.
    """

    takes_shards = False

    def __init__(self, every_n_steps: int = 100) -> None:
        check_least(every_n_steps=every_n_steps)
        self._every = every_n_steps
        self._before: Named = {}
        self._gradients: Named = {}
        self._measured: Named = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Copy gradients and weights before the step; of each turn, where a task has turns."""
        if (trainer.state.global_step + 1) % self._every or not trainer.is_main:
            return
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                self._gradients[name] = parameter.grad.detach().clone()
            if parameter.requires_grad and name not in self._before:
                self._before[name] = parameter.detach().clone()

    def on_update_end(self, trainer: Trainer) -> None:
        """Compute the norms of the gradients and of the changes."""
        before, gradients, self._before, self._gradients = self._before, self._gradients, {}, {}
        if trainer.state.skipped_in_a_row or not before:
            return
        after = dict(trainer.model.named_parameters())
        change = _norms({name: after[name].detach() - old for name, old in before.items()})
        size = _norms(before)
        self._measured |= {f"grad_norm/{layer}": n for layer, n in _norms(gradients).items()}
        self._measured |= {
            f"update_ratio/{layer}": change[layer] / size[layer].clamp(min=1e-12) for layer in size
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is measured and not logged yet."""
        return {"measured": dict(self._measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what is to be logged next."""
        self._measured = dict(state["measured"])

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the values since the last log line, in one transfer to the host."""
        measured, self._measured = self._measured, {}
        values = torch.stack(list(measured.values())).tolist() if measured else []
        return dict(zip(measured, values, strict=True))


def _norms(tensors: Named) -> Named:
    """Return the norm over the parameters of each layer: names without their last part."""
    squares: Named = {}
    for name, tensor in tensors.items():
        layer, square = name.rpartition(".")[0] or name, tensor.float().square().sum()
        squares[layer] = squares[layer] + square if layer in squares else square
    return {layer: square.sqrt() for layer, square in squares.items()}


class Texts(Callback):
    """Log the resolved configuration, the overrides and the plan, as `run/...`, once.

    The plan is that of a dry run in the same directory, or else a short one.
    """

    def __init__(self) -> None:
        self._done = False

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Log the texts after the setup of all callbacks; a resumed run has logged them already."""
        if self._done or trainer.resumed or not trainer.is_main or trainer.run_dir is None:
            return
        self._done = True
        texts = {"plan": "\n".join(_short_plan(trainer))}
        for name, file in {"config": CONFIG, "overrides": OVERRIDES, "plan": PLAN}.items():
            if (path := trainer.run_dir / file).is_file():
                texts[name] = path.read_text(encoding="utf-8")
        for name, text in texts.items():
            trainer.log_text(f"run/{name}", code_block(text))


def _short_plan(trainer: Trainer) -> Iterator[str]:
    options, strategy = trainer.options, trainer.strategy
    sizes = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    yield f"epochs      {options.max_epochs or '-'}, updates {trainer.total_steps or 'unknown'}"
    yield f"devices     {strategy.devices} x {strategy.device.type}, strategy {strategy.name}"
    yield f"precision   {trainer.precision.name}"
    yield f"parameters  {sum(size for size, _ in sizes):,}, trained {trained:,}"
    for name, rate in trainer.learning_rates().items():
        yield f"group       {name}: first learning rate {rate:.4g}"
    for callback in trainer.callbacks.values():
        yield from (f"{callback.name}: {line}" for line in callback.explain(trainer))
