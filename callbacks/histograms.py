"""Histograms of the weights in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
    HistogramProto,
    Summary,
)
from torch import Tensor

from callbacks.support.errors import CallbackError
from callbacks.tensorboard import TensorBoard
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Histograms(Callback):
    """Write a histogram of every parameter, `weights/<name>`, every `every_n_epochs` epochs.

    They are written to the event file of the TensorBoard callback, which the run must have.
    """

    def __init__(self, every_n_epochs: int = 1, bins: int = 64) -> None:
        if every_n_epochs < 1 or bins < 1:
            raise CallbackError(f"every_n_epochs={every_n_epochs}, bins={bins}: at least 1")
        self._every_n_epochs = every_n_epochs
        self._bins = bins
        self._board: TensorBoard | None = None

    def setup(self, trainer: Trainer) -> None:
        """Find the TensorBoard callback. Raises CallbackError if there is none."""
        boards = [c for c in trainer.callbacks.values() if isinstance(c, TensorBoard)]
        if not boards:
            raise CallbackError(f"callbacks.{self.name} needs callbacks.tensorboard")
        self._board = boards[0]

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Write the histograms."""
        if self._board is None or trainer.state.epoch % self._every_n_epochs:
            return
        for name, parameter in trainer.model.named_parameters():
            histogram = describe(parameter.detach(), self._bins)
            value = Summary.Value(tag=f"weights/{name}", histo=histogram)
            self._board.write(trainer.state.global_step, Summary(value=[value]))


def describe(tensor: Tensor, bins: int) -> HistogramProto:
    """Return the histogram of the finite values of a tensor."""
    values = tensor.double().flatten().cpu().numpy()
    values = values[np.isfinite(values)]
    counts, edges = np.histogram(values, bins=bins)
    return HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=values.size,
        sum=values.sum(),
        sum_squares=float(values @ values),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
