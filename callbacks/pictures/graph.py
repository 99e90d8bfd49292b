"""The graph of a model, for TensorBoard's Graphs tab."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard._pytorch_graph import graph

from callbacks.support.errors import CallbackError
from callbacks.tensorboard import TensorBoard
from data.batch import inputs_of
from trainer import rng
from trainer.callback import Callback

if TYPE_CHECKING:
    from data.batch import MicroBatch
    from trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Graph(Callback):
    """Write the graph of the model, traced with the first sample, once.

    It needs the TensorBoard callback: no other tool shows graphs. A model that cannot be traced is
    a warning.
    """

    takes_shards = False

    def __init__(self) -> None:
        self._inputs: Any = None
        self._board: TensorBoard | None = None

    def setup(self, trainer: Trainer) -> None:
        """Find the TensorBoard callback. Raises CallbackError if there is none."""
        boards = [c for c in trainer.callbacks.values() if isinstance(c, TensorBoard)]
        if not boards:
            raise CallbackError(f"callbacks.{self.name} needs callbacks.tensorboard")
        self._board = boards[0]

    def on_update_start(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        """Keep the first sample of the run."""
        if not trainer.state.updates and trainer.is_main:
            self._inputs = inputs_of(micro_batches[0].batch)[:1].clone()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Trace the model at the first log line."""
        if self._inputs is None or self._board is None:
            return
        inputs, self._inputs = self._inputs, None
        modes = [(module, module.training) for module in trainer.model.modules()]
        with rng.preserved(trainer.strategy.device), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch's tracer warns about values that it treats as constants
            try:
                drawn, _ = graph(trainer.model, (inputs,))  # type: ignore[no-untyped-call]
                self._board.write_graph(drawn.SerializeToString())
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                _log.warning("callbacks.%s: the model cannot be traced: %s", self.name, reason)
            finally:
                for module, mode in modes:
                    module.training = mode
