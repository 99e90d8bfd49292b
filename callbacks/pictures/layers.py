"""Norms of gradients and updates of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callbacks.support.errors import CallbackError
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Named = dict[str, Tensor]


class LayerStatistics(Callback):
    """Log `grad_norm/<layer>` and `update_ratio/<layer>` every `every_n_steps` steps.

    The norm is that of the clipped gradient. The ratio is the norm of the change in an update over
    the norm of the weights before: about 1e-3 is usual. The weights are copied for it in that
    update. The values are in the next log line, so choose a multiple of trainer.log_every_n_steps.
    """

    takes_shards = False

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise CallbackError(f"every_n_steps={every_n_steps}: choose at least 1")
        self._every = every_n_steps
        self._before: Named = {}
        self._gradients: Named = {}  # squares of the norms
        self._measured: dict[str, Tensor] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Compute the norms of a turn's gradients, and copy the weights before its step."""
        if (trainer.state.global_step + 1) % self._every or not trainer.is_main:
            return
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                self._gradients[name] = parameter.grad.detach().float().square().sum()
            if parameter.requires_grad and name not in self._before:
                self._before[name] = parameter.detach().clone()

    def on_update_end(self, trainer: Trainer) -> None:
        """Compute the norms of the changes."""
        if not self._before:
            return
        before, self._before = self._before, {}
        gradients, self._gradients = self._gradients, {}
        if trainer.state.skipped_in_a_row:
            return
        after = dict(trainer.model.named_parameters())
        changes = {n: (after[n].detach() - old).float().square().sum() for n, old in before.items()}
        sizes = {name: old.float().square().sum() for name, old in before.items()}
        for layer, norm in _by_layer(gradients).items():
            self._measured[f"grad_norm/{layer}"] = norm
        largest = _by_layer(sizes)
        for layer, change in _by_layer(changes).items():
            self._measured[f"update_ratio/{layer}"] = change / largest[layer].clamp(min=1e-12)

    def state_dict(self) -> dict[str, Any]:
        """Return what is measured and not logged yet."""
        return {"measured": dict(self._measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what is to be logged next."""
        self._measured = dict(state["measured"])

    def scalars(self, trainer: Trainer) -> dict[str, float]:
        """Return the values since the last log line, in one transfer to the host."""
        if not self._measured:
            return {}
        names, values = list(self._measured), torch.stack(list(self._measured.values()))
        self._measured = {}
        return dict(zip(names, values.tolist(), strict=True))


def _by_layer(squares: Named) -> Named:
    """Return the norm over the parameters of each layer: names without their last part."""
    layers: Named = {}
    for name, square in squares.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers[layer] + square if layer in layers else square
    return {layer: square.sqrt() for layer, square in layers.items()}
