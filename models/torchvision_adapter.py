"""Models of torchvision by name, for the classes and channels of the data."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torchvision
from torch import Tensor, nn

from regimen.models.layers import NetworkError
from regimen.models.pretrained import fetch, resize_head, resize_input, weights_wanted

# The auxiliary outputs of these two would make the output a tuple in training. Their builders set
# `transform_input` only if they load trained weights themselves.
_INCEPTIONS = ("googlenet", "inception_v3")


def build(
    name: str, num_classes: int, in_channels: int = 3, weights: str | None = None, **arguments: Any
) -> nn.Module:
    """Build torchvision's model `name`; `arguments` go to its builder.

    `weights` names an entry of the model's weights, such as `DEFAULT` or `IMAGENET1K_V2`. The head
    is initialized anew if its number of classes differs. Segmentation models return their main
    output, a tensor.
    """
    known = torchvision.models.list_models()
    if name not in known:
        near = ", ".join(get_close_matches(name, known)) or "torchvision.models.list_models()"
        raise NetworkError(f"model.name: torchvision has no model {name!r}; nearest: {near}")
    builder = torchvision.models.get_model_builder(name)
    family = builder.__module__.split(".")[2]
    given = {"weights": None, "num_classes": num_classes}
    if "weights_backbone" in inspect.signature(builder).parameters:
        given["weights_backbone"] = None  # torchvision would download them by default
    if name in _INCEPTIONS:
        trained = weights is not None
        given |= {"aux_logits": False, "init_weights": True, "transform_input": trained}
    if weights is None:
        model = builder(**given | arguments)
    else:
        entries = torchvision.models.get_model_weights(name)
        if weights not in entries.__members__:
            has = ", ".join(entries.__members__) or "none"
            raise NetworkError(f"model.weights: {name} has no {weights!r}; it has: {has}")
        entry = entries[weights]
        outputs = given["num_classes"] = len(entry.meta["categories"])
        if outputs != num_classes and family == "detection":
            raise NetworkError(
                f"model.num_classes={num_classes}: the trained head of {name} has "
                f"{outputs} classes and cannot be resized; remove model.weights"
            )
        model = builder(**given | arguments)
        if weights_wanted():
            # The files of the Inceptions have the auxiliary outputs, too.
            model.load_state_dict(fetch(entry), strict=name not in _INCEPTIONS)
        resize_head(model, num_classes, outputs)
    if in_channels != 3:
        resize_input(model, in_channels, weights is not None)
    if family == "segmentation":
        model.register_forward_hook(_main_output)
    return model  # type: ignore[no-any-return]


def _main_output(model: nn.Module, inputs: Any, output: Mapping[str, Tensor]) -> Tensor:
    return output["out"]
