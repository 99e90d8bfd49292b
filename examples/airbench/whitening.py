"""Whitening: the first convolution's filters from the principal components of image patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from regimen import Callback
from regimen.callbacks.support import CallbackError, check_least
from regimen.callbacks.unfreeze import set_trainable
from regimen.data.batch import inputs_of

if TYPE_CHECKING:
    from regimen.trainer.trainer import Trainer


class Whitening(Callback):
    """Set a convolution's filters so that its outputs are uncorrelated, of variance 1 (airbench).

    Before the first update, the filters of `module` become the principal components of its patches
    in `samples` training images (as the network is given them, of epoch 0), each divided by the
    root of its variance + `eps`, and their negatives. A resumed run has them in its checkpoint.
    The bias is trained for the first `bias_epochs` epochs: a number, or a fraction of `max_epochs`.
    """

    supports_sharding = False

    def __init__(
        self,
        module: str = "whiten",
        samples: int = 5000,
        eps: float = 5e-4,
        bias_epochs: float | None = None,
    ) -> None:
        check_least(samples=samples)
        check_least(0, bias_epochs=bias_epochs)
        self._module = module
        self._samples = samples
        self._eps = eps
        self._bias_epochs = bias_epochs
        self.freezes = bias_epochs is not None

    def check(self, model: nn.Module) -> None:
        """Raise CallbackError if the model has no such convolution."""
        layer = dict(model.named_modules()).get(self._module)
        key = f"callbacks.{self.name or 'whitening'}.module"
        if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or isinstance(layer.padding, str):
            found = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
            raise CallbackError(
                key,
                f"is {self._module!r}, which is no convolution of the model",
                f"it has {', '.join(found[:5]) or 'none'}",
            )
        components = layer.weight[0].numel()
        if layer.out_channels != 2 * components:
            raise CallbackError(
                key,
                f"{self._module} has {layer.out_channels} filters",
                f"patches of {components} numbers require {2 * components}",
            )

    def setup(self, trainer: Trainer) -> None:
        """Find the layer, and how long its bias is trained."""
        self.check(trainer.model)
        epochs = self._bias_epochs
        max_epochs = trainer.options.max_epochs
        if epochs is not None and 0 < epochs < 1:
            if max_epochs is None:
                raise CallbackError(
                    f"callbacks.{self.name}.bias_epochs={epochs} is a fraction of "
                    "trainer.max_epochs, which is not set: give a number of epochs"
                )
            self._bias_epochs = int(epochs * max_epochs)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Set the filters, unless a checkpoint holds them."""
        if not trainer.state.updates and not trainer.resumed:
            layer = self._layer(trainer)
            covariance = self._covariance(trainer, layer)
            with torch.no_grad():
                layer.weight.copy_(filters(covariance, self._eps).view(layer.weight.shape))
                if layer.bias is not None:
                    layer.bias.zero_()

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Train the bias in the first epochs only."""
        layer = self._layer(trainer)
        if layer.bias is not None and self._bias_epochs is not None:
            trains = trainer.state.epoch < self._bias_epochs
            if layer.bias.requires_grad != trains:
                set_trainable(layer, [layer.bias], trains)

    def _layer(self, trainer: Trainer) -> nn.Conv2d:
        layer = trainer.model.get_submodule(self._module)
        assert isinstance(layer, nn.Conv2d)
        return layer

    def _covariance(self, trainer: Trainer, layer: nn.Conv2d) -> Tensor:
        """Return the second moments of the patches over all processes (k, k), on the CPU."""
        size = layer.weight[0].numel()
        total = torch.zeros(size, size, dtype=torch.float64)
        count = torch.zeros((), dtype=torch.float64)
        trainer.train_loader.close()
        for micro_batches in trainer.draw(0):
            for micro_batch in micro_batches:
                if micro_batch.batch_slice.count:
                    patches = _patches(_inputs(micro_batch.batch), layer)
                    total += (patches.T @ patches).cpu()
                    count += len(patches)
            batch_slice = micro_batches[0].batch_slice
            if (batch_slice.update + 1) * batch_slice.total >= self._samples:
                break
        trainer.train_loader.close()
        group = trainer.group
        device = trainer.strategy.device
        # Collectives: the sums over all processes.
        total = group.reduce(total.to(device)).cpu()
        count = group.reduce(count.to(device)).cpu()
        return total / count


def filters(covariance: Tensor, eps: float) -> Tensor:
    """Return the whitening filters (2 k, k) of patches with second moments (k, k)."""
    variances, components = torch.linalg.eigh(covariance)
    scaled = components.T / (variances + eps).sqrt()[:, None]
    return torch.cat([scaled, -scaled])


def _patches(images: Tensor, layer: nn.Conv2d) -> Tensor:
    """Return the patches that a layer sees of images, without padding: (n, in * h * w).

    In float64, so that the split of an update into micro-batches has no say.
    """
    height, width = layer.kernel_size
    cut = unfold(images.double(), (height, width), layer.dilation, stride=layer.stride)
    return cut.transpose(1, 2).flatten(0, 1)


def _inputs(batch: Any) -> Tensor:
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        raise CallbackError("callbacks.whitening: a batch must begin with images (n, C, H, W)")
    return inputs
