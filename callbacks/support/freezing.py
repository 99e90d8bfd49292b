"""Freeze parameters within a run, and let them train again."""

from collections.abc import Iterable

from torch import Tensor, nn


def set_trainable(model: nn.Module, parameters: Iterable[Tensor], trains: bool) -> None:
    """Let parameters of a model train or not, and drop their gradients.

    They are entered into their modules again: torch 2.11's compiler checks `requires_grad` only
    where a module's parameters were replaced, and would go on without a parameter's gradient.
    """
    chosen = {id(parameter) for parameter in parameters}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in chosen:
                parameter.requires_grad_(trains)
                parameter.grad = None
                module._parameters[name] = None
                module._parameters[name] = parameter
