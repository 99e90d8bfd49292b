"""Models of torchvision by name, with trained weights, for other classes and channels."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torchvision
from torch import Tensor, nn

from models.errors import NetworkError
from models.resize import resize_head, resize_input
from models.weights import fetch, weights_wanted

# The auxiliary outputs of these two would make the output a tuple in training. With trained weights
# they need `transform_input`, which their builders set only if they load the weights themselves.
_INCEPTIONS = ("googlenet", "inception_v3")


def build(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    weights: str | None = None,
    **arguments: Any,
) -> nn.Module:
    """Build torchvision's model `name`; `arguments` go to its builder.

    `weights` names an entry of the model's weights, such as `DEFAULT` or `IMAGENET1K_V2`. The head
    is initialized anew if its number of classes differs. Segmentation models return their main
    output, a tensor.
    """
    builder = _builder(name)
    arguments = _defaults(name, builder) | arguments
    if weights is None:
        model = builder(num_classes=num_classes, **arguments)
    else:
        model = _trained(name, builder, weights, num_classes, arguments)
    if in_channels != 3:
        resize_input(model, in_channels, trained=weights is not None)
    if builder.__module__.startswith("torchvision.models.segmentation"):
        model.register_forward_hook(_main_output)
    return model


def _builder(name: str) -> Callable[..., nn.Module]:
    known = torchvision.models.list_models()
    if name not in known:
        near = (
            ", ".join(get_close_matches(name, known, n=3)) or "see torchvision.models.list_models()"
        )
        raise NetworkError(f"model.name: torchvision has no model {name!r}; nearest: {near}")
    return torchvision.models.get_model_builder(name)  # type: ignore[no-any-return]


def _defaults(name: str, builder: Callable[..., nn.Module]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        defaults["weights_backbone"] = None  # torchvision would download them by default
    if name in _INCEPTIONS:
        defaults |= {"aux_logits": False, "init_weights": True}
    return defaults


def _trained(
    name: str,
    builder: Callable[..., nn.Module],
    weights: str,
    num_classes: int,
    arguments: dict[str, Any],
) -> nn.Module:
    entries = torchvision.models.get_model_weights(name)
    if weights not in entries.__members__:
        known = ", ".join(entries.__members__) or "none"
        raise NetworkError(f"model.weights: {name} has no {weights!r}; it has: {known}")
    entry = entries[weights]
    classes = len(entry.meta["categories"])
    if classes != num_classes and builder.__module__.startswith("torchvision.models.detection"):
        raise NetworkError(
            f"model.num_classes={num_classes}: the trained head of {name} has {classes} classes "
            "and cannot be resized; remove model.weights"
        )
    if name in _INCEPTIONS:
        arguments = {"transform_input": True} | arguments
    model = builder(num_classes=classes, **arguments)
    if weights_wanted():
        _load(model, name, fetch(entry))
    resize_head(model, num_classes, outputs=classes)
    return model


def _load(model: nn.Module, name: str, state: dict[str, Tensor]) -> None:
    if name in _INCEPTIONS:  # their files contain the auxiliary outputs, too
        own = model.state_dict()
        state = {key: value for key, value in state.items() if key in own}
    model.load_state_dict(state)


def _main_output(model: nn.Module, inputs: Any, output: Mapping[str, Tensor]) -> Tensor:
    return output["out"]
