"""The loss of a language model in chunks, without the logits of all tokens at once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regimen.data.batch import IGNORED
from regimen.trainer.errors import ModelError, qualified_name

_KEY = "task.chunked_loss"
_PROBE = 3.0  # goes through whatever the model does to its logits


class ChunkedLoss:
    """Cross entropy of a model's output layer by `torch.nn.functional.linear_cross_entropy`.

    While the model is called, its output layer returns the sum of the losses in place of logits: so
    all that wraps the model (DDP, FSDP) works as ever. What a model does to its logits, such as a
    scale or a soft cap, would be done to the loss: a number beside it shows that, and it is
    refused. Raises ModelError for a loss or a version of torch that cannot.
    """

    def __init__(self, loss: Any) -> None:
        if not hasattr(functional, "linear_cross_entropy"):
            raise ModelError(
                _KEY,
                f"torch {torch.__version__} has no linear_cross_entropy",
                "torch 2.15 has it; or set task.chunked_loss=false",
            )
        is_plain = (
            type(loss) is nn.CrossEntropyLoss
            and loss.reduction == "mean"
            and loss.weight is None
            and loss.ignore_index == IGNORED
        )
        if not is_plain or loss.label_smoothing:
            raise ModelError(
                _KEY,
                f"is true, and task.loss is {loss!r}, which is not computed in chunks",
                "it takes torch.nn.CrossEntropyLoss without label_smoothing and weight",
            )
        self._target: Tensor | None = None
        self._calls = 0
        self._is_checked = False
        self._replaced = self._forward  # one object, so that torch.compile sees the same each time

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], target: Tensor) -> Tensor:
        """Return the sum of the losses of labels [n, length] that are not -100."""
        self._layer = _output_layer(model)
        self._target = target
        self._calls = 0
        self._layer.forward = self._replaced  # type: ignore[method-assign]
        try:
            output = model(**inputs)
        finally:
            del self._layer.forward  # that of the class is seen again
        logits = getattr(output, "logits", output)
        if not self._is_checked:
            self._check(model, logits)
        return logits.flatten()[0]  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of the losses and the probe, in the shape of logits [1, 1, 2]."""
        assert self._target is not None
        self._calls += 1
        weight = self._layer.weight
        # Sums in a short format lose two digits: there the losses of tokens are added up in fp32,
        # for which the chunks are computed once more in the backward pass.
        is_short = weight.dtype.itemsize < 4
        losses = functional.linear_cross_entropy(
            # Under autocast the hidden states may have another format than the weight.
            hidden.flatten(0, -2).to(weight.dtype),
            weight,
            self._target.flatten(),
            linear_bias=self._layer.bias,
            reduction="none" if is_short else "sum",
            ignore_index=IGNORED,
            options=nn.LinearCrossEntropyOptions(),
        )
        total = losses.float().sum() if is_short else losses
        return torch.stack([total, torch.full_like(total, _PROBE)]).view(1, 1, 2)

    def _check(self, model: nn.Module, logits: Any) -> None:
        """Raise ModelError for a model whose logits are not what its output layer returns.

        Waits for the device, once in a run.
        """
        fits = isinstance(logits, Tensor) and logits.shape == (1, 1, 2) and self._calls == 1
        if not fits or float(logits.detach()[0, 0, 1]) != _PROBE:
            raise ModelError(
                _KEY,
                f"is true, and {qualified_name(model)} scales or caps its logits behind its output "
                "layer, or does not call it once: its loss is not the one in chunks",
                "set task.chunked_loss=false",
            )
        self._is_checked = True


def _output_layer(model: nn.Module) -> nn.Linear:
    """Return the layer that makes the logits. Raises ModelError for one that is not linear."""
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        if not callable(find):
            continue
        layer = find()
        if type(layer) is nn.Linear:
            return layer
        raise ModelError(
            _KEY,
            f"is true, and the output layer of {qualified_name(module)} is "
            f"{qualified_name(layer)}, not torch.nn.Linear",
            "leave it out of model.targets if it has an adapter, or set task.chunked_loss=false",
        )
    raise ModelError(
        _KEY,
        f"is true, and {qualified_name(model)} has no get_output_embeddings(), which returns the "
        "layer of its logits, as models of transformers have",
        "set task.chunked_loss=false",
    )
