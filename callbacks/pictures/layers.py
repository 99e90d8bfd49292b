"""The norms of each layer's gradients, and of its changes in an update."""

import torch
from torch import Tensor

from regimen.callbacks.support import check_least, gradients_of
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer

Named = dict[str, Tensor]


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
        self._before: Named = {}
        self._gradients: Named = {}
        self.measured: Named = {}  # and not logged yet

    def on_gradients(self, trainer: Trainer) -> None:
        """Copy gradients and weights before the step; of each turn, where a task has turns."""
        if (trainer.state.global_step + 1) % self._every or not trainer.is_main:
            return
        self._gradients |= gradients_of(trainer.model)
        weights = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        self._before = {n: p.detach().clone() for n, p in weights.items()} | self._before

    def on_update_end(self, trainer: Trainer) -> None:
        """Compute the norms of the gradients and of the changes."""
        before, gradients, self._before, self._gradients = self._before, self._gradients, {}, {}
        if trainer.state.skipped_in_a_row or not before:
            return
        after = dict(trainer.model.named_parameters())
        change = _norms({name: after[name].detach() - old for name, old in before.items()})
        size = _norms(before)
        self.measured |= {f"grad_norm/{layer}": n for layer, n in _norms(gradients).items()}
        self.measured |= {
            f"update_ratio/{layer}": change[layer] / size[layer].clamp(min=1e-12) for layer in size
        }

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the values since the last log line, in one transfer to the host."""
        measured, self.measured = self.measured, {}
        values = torch.stack(list(measured.values())).tolist() if measured else []
        return dict(zip(measured, values, strict=True))


def _norms(tensors: Named) -> Named:
    """Return the norm over the parameters of each layer: names without their last part."""
    squares: Named = {}
    for name, tensor in tensors.items():
        layer, square = name.rpartition(".")[0] or name, tensor.float().square().sum()
        squares[layer] = squares[layer] + square if layer in squares else square
    return {layer: square.sqrt() for layer, square in squares.items()}
