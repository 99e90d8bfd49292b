"""The graph of the model, traced with one sample, for TensorBoard."""

import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
    EventFileLoader,
)
from torch.utils.tensorboard import SummaryWriter

from callbacks.support import require
from callbacks.tensorboard import TensorBoard
from data.batch import MicroBatch, inputs_of
from trainer.callback import Callback
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
        self._boards: list[TensorBoard] = []

    def setup(self, trainer: Trainer) -> None:
        """Find the TensorBoard callback. Raises CallbackError if there is none."""
        self._boards = [c for c in trainer.callbacks.values() if isinstance(c, TensorBoard)]
        require(bool(self._boards), f"callbacks.{self.name} needs callbacks.tensorboard")

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
