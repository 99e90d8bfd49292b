"""Models of the package timm by name (not a dependency: `pip install timm`)."""

import importlib
from typing import Any

from torch import nn

from models.errors import NetworkError, WeightsError
from models.weights import weights_wanted


def build(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    pretrained: bool = False,
    **arguments: Any,
) -> nn.Module:
    """Build timm's model `name`; `arguments` (such as `drop_rate`) go to `timm.create_model`."""
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise NetworkError("model=timm needs the package timm: pip install timm") from None
    if name.split(".")[0] not in timm.list_models():
        near = ", ".join(timm.list_models(f"*{name[:6]}*")[:3]) or "see timm.list_models()"
        raise NetworkError(f"model.name: timm has no model {name!r}; similar: {near}")
    try:
        model: nn.Module = timm.create_model(
            name,
            pretrained=pretrained and weights_wanted(),
            num_classes=num_classes,
            in_chans=in_channels,
            **arguments,
        )
    except OSError as error:
        raise WeightsError(f"model.pretrained: no weights for {name}: {error}") from error
    return model
