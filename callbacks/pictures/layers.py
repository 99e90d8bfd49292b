"""The norms of each layer's gradients, and of its changes in an update."""

import torch
from torch import Tensor

from regimen.callbacks.support import check_least, gradients_of
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer

Tensors = dict[str, Tensor]  # by name


class LayerStatistics(Callback):
    """Log `grad_norm/<layer>` and `update_ratio/<layer>` every `every_n_steps` steps.

    The norm is that of the clipped gradient. The ratio is the norm of the change in an update over
    the norm of the weights before: about 1e-3 is usual. The weights are copied for it in that
    update. The values are in the next log line, so choose a multiple of trainer.log_every_n_steps.
    """

    supports_sharding = False
    persistent = ("measured",)

    def __init__(self, every_n_steps: int = 100) -> None:
        check_least(every_n_steps=every_n_steps)
        self._every = every_n_steps
        self._weights: Tensors = {}  # before the update
        self._gradients: Tensors = {}
        self.measured: Tensors = {}  # norms and ratios that are not logged yet

    def on_gradients(self, trainer: Trainer) -> None:
        """Copy gradients and weights before the step; of each turn, where a task has turns."""
        if (trainer.state.global_step + 1) % self._every or not trainer.is_main:
            return
        self._gradients |= gradients_of(trainer.model)
        for name, parameter in trainer.model.named_parameters():
            # What an earlier turn has copied stays.
            if parameter.requires_grad and name not in self._weights:
                self._weights[name] = parameter.detach().clone()

    def on_update_end(self, trainer: Trainer) -> None:
        """Compute the norms of the gradients and of the changes."""
        weights = self._weights
        gradients = self._gradients
        self._weights = {}
        self._gradients = {}
        if trainer.state.skipped_in_a_row or not weights:
            return
        for layer, norm in _norms(gradients).items():
            self.measured[f"grad_norm/{layer}"] = norm
        parameters = dict(trainer.model.named_parameters())
        changes = {name: parameters[name].detach() - old for name, old in weights.items()}
        change_norms = _norms(changes)
        for layer, norm in _norms(weights).items():
            self.measured[f"update_ratio/{layer}"] = change_norms[layer] / norm.clamp(min=1e-12)

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the values since the last log line."""
        measured = self.measured
        self.measured = {}
        if not measured:
            return {}
        # The host waits here, at a log line, for one transfer of all values.
        values = torch.stack(list(measured.values())).tolist()
        return dict(zip(measured, values, strict=True))


def _norms(tensors: Tensors) -> Tensors:
    """Return the norm over the parameters of each layer: names without their last part."""
    squares: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.rpartition(".")[0] or name
        square = tensor.float().square().sum()
        if layer in squares:
            square = squares[layer] + square
        squares[layer] = square
    return {layer: square.sqrt() for layer, square in squares.items()}
