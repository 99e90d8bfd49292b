"""Models of timm by name; timm is optional and imported when a model is built."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from regimen.data.errors import import_package
from regimen.models.layers import NetworkError
from regimen.models.pretrained import parameters_as_in, weights_wanted
from regimen.trainer.checkpoints.borrowed import mark_as_read
from regimen.trainer.checkpoints.reader import model_only
from regimen.trainer.errors import CheckpointError

_FILE = "model.pretrained_cfg_overlay.file"


def build(
    name: str, num_classes: int, in_channels: int = 3, pretrained: bool = False, **arguments: Any
) -> nn.Module:
    """Build timm's model `name`; `arguments` (such as `drop_rate`) go to `timm.create_model`.

    Of the weights of a file, `pretrained_cfg_overlay={"file": ...}`, checkpoints can leave out what
    stays frozen; where timm downloads others, it does not say what it has read.
    """
    timm = import_package("timm", "timm")
    if name.split(".")[0] not in timm.list_models():
        similar = ", ".join(timm.list_models(f"*{name[:6]}*")[:3]) or "see timm.list_models()"
        raise NetworkError(f"model.name: timm has no model {name!r}; similar: {similar}")
    options = {"num_classes": num_classes, "in_chans": in_channels, **arguments}
    load = pretrained and weights_wanted()
    try:
        model: nn.Module = timm.create_model(name, pretrained=load, **options)
    except OSError as error:
        raise CheckpointError(f"model.pretrained: no weights for {name}: {error}") from error
    file = (arguments.get("pretrained_cfg_overlay") or {}).get("file")
    if load and file:
        with suppress(CheckpointError):  # of a form that timm alone reads
            # timm adapts others to the channels and the classes, or renames them: these are saved.
            read = parameters_as_in(model, model_only(Path(file)))
            mark_as_read(model, read, [Path(file)], _FILE, file)
    return model
