"""The graph of the model, traced with one sample, for TensorBoard."""

import copy
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
    EventFileLoader,
)
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from regimen.callbacks.support import require
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.trackers.recorder import Recorder
from regimen.data.batch import MicroBatch, inputs_of
from regimen.trainer.trainer import Trainer


class Graph(Recorder):
    """Write the graph of the model, traced with the first sample, once.

    It needs the TensorBoard callback: no other tool shows graphs. A model that cannot be traced is
    a warning.
    """

    of_run = False
    supports_sharding = False

    def __init__(self) -> None:
        super().__init__()
        self._inputs: Any = None
        self._boards = list[TensorBoard]()

    def setup(self, trainer: Trainer) -> None:
        """Find the TensorBoard callback. Raises CallbackError if there is none."""
        self._boards = [c for c in trainer.callbacks.values() if isinstance(c, TensorBoard)]
        require(self._boards, f"callbacks.{self.name} needs callbacks.tensorboard")

    def on_update_start(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        """Keep the first sample of the run."""
        if not trainer.state.updates and trainer.is_main:
            inputs = inputs_of(micro_batches[0].batch)
            if isinstance(inputs, Tensor):  # torch's tracer passes no arguments by name
                self._inputs = inputs[:1].clone()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Trace the model at the first log line."""
        if self._inputs is not None:
            self.attempt(self._trace, trainer)
            self._inputs = None

    def _trace(self, trainer: Trainer) -> None:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # torch's tracer warns about values that it treats as constants
            warnings.simplefilter("ignore")
            with SummaryWriter(folder) as writer:
                writer.add_graph(copy.deepcopy(trainer.model), (self._inputs,))
            (path,) = Path(folder).iterdir()
            graphs = [event.graph_def for event in EventFileLoader(str(path)).Load()]
            self._boards[0].write_graph(max(graphs, key=len))
