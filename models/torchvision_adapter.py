"""Models of torchvision by name, for the classes and channels of the data."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torchvision
from torch import Tensor, nn

from regimen.models.layers import NetworkError
from regimen.models.pretrained import (
    cached_file,
    fetch,
    parameters_as_in,
    resize_head,
    resize_input,
    weights_wanted,
)
from regimen.trainer.checkpoints.borrowed import mark_as_read

# Networks with auxiliary outputs, which would make the output a tuple in training. Their builders
# set `transform_input` only if they load trained weights themselves.
_INCEPTIONS = ("googlenet", "inception_v3")


def build(
    name: str, num_classes: int, in_channels: int = 3, weights: str | None = None, **arguments: Any
) -> nn.Module:
    """Build torchvision's model `name`; `arguments` go to its builder.

    `weights` names an entry of the model's weights, such as `DEFAULT` or `IMAGENET1K_V2`. The head
    is initialized anew if its number of classes differs. Segmentation models return their main
    output, a tensor; with `aux_loss=True` in training a dict of it, `out`, and of `aux`.
    """
    names = torchvision.models.list_models()
    if name not in names:
        nearest = ", ".join(get_close_matches(name, names)) or "torchvision.models.list_models()"
        raise NetworkError(f"model.name: torchvision has no model {name!r}; nearest: {nearest}")
    builder = torchvision.models.get_model_builder(name)
    family = builder.__module__.split(".")[2]  # such as `segmentation`

    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None  # torchvision would download them by default
    if name in _INCEPTIONS:
        options["aux_logits"] = False
        options["init_weights"] = True
        options["transform_input"] = weights is not None

    if weights is None:
        model = builder(**options | arguments)
    else:
        entries = torchvision.models.get_model_weights(name)
        if weights not in entries.__members__:
            available = ", ".join(entries.__members__) or "none"
            raise NetworkError(f"model.weights: {name} has no {weights!r}; it has: {available}")
        entry = entries[weights]
        # Built with the head of the weights, which is resized once they are loaded.
        trained_classes = len(entry.meta["categories"])
        if trained_classes != num_classes and family == "detection":
            raise NetworkError(
                f"model.num_classes={num_classes}: the trained head of {name} has "
                f"{trained_classes} classes and cannot be resized; remove model.weights"
            )
        options["num_classes"] = trained_classes
        model = builder(**options | arguments)
        state = {}
        if weights_wanted():
            state = fetch(entry)
            if getattr(model, "aux_classifier", 0) is None:
                state = {k: v for k, v in state.items() if not k.startswith("aux_classifier.")}
            # The weights of the Inceptions include the auxiliary outputs, which were not built.
            model.load_state_dict(state, strict=name not in _INCEPTIONS)
        resize_head(model, num_classes, trained_classes)
        read = parameters_as_in(model, state)  # a head of another size has new values
        mark_as_read(model, read, [cached_file(entry)], "model.weights", weights)
    if in_channels != 3:
        resize_input(model, in_channels, weights is not None)
    if family == "segmentation":
        model.register_forward_hook(_main_output)
    return model  # type: ignore[no-any-return]


def _main_output(
    model: nn.Module, inputs: Any, output: Mapping[str, Tensor]
) -> Tensor | dict[str, Tensor]:
    if model.training and "aux" in output:
        return {"out": output["out"], "aux": output["aux"]}
    return output["out"]
