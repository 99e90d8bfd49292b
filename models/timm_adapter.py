"""Models of timm by name; timm is optional and imported when a model is built."""

from typing import Any

from torch import nn

from regimen.data.errors import import_package
from regimen.models.layers import NetworkError
from regimen.models.pretrained import weights_wanted
from regimen.trainer.errors import CheckpointError


def build(
    name: str, num_classes: int, in_channels: int = 3, pretrained: bool = False, **arguments: Any
) -> nn.Module:
    """Build timm's model `name`; `arguments` (such as `drop_rate`) go to `timm.create_model`."""
    timm = import_package("timm", "timm")
    if name.split(".")[0] not in timm.list_models():
        similar = ", ".join(timm.list_models(f"*{name[:6]}*")[:3]) or "see timm.list_models()"
        raise NetworkError(f"model.name: timm has no model {name!r}; similar: {similar}")
    options = {"num_classes": num_classes, "in_chans": in_channels, **arguments}
    load = pretrained and weights_wanted()
    try:
        return timm.create_model(name, pretrained=load, **options)  # type: ignore[no-any-return]
    except OSError as error:
        raise CheckpointError(f"model.pretrained: no weights for {name}: {error}") from error
