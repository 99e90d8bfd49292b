"""Models of torchvision, timm and transformers by name, for the classes and channels of the data.

timm and transformers are no dependencies: they are imported when one of their models is built.
"""

import importlib
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from models.layers import NetworkError
from models.pretrained import WeightsError, fetch, resize_head, resize_input, weights_wanted

# The auxiliary outputs of these two would make the output a tuple in training. Their builders set
# `transform_input` only if they load trained weights themselves.
_INCEPTIONS = ("googlenet", "inception_v3")


def from_torchvision(
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
    known = torchvision.models.list_models()
    if name not in known:
        near = ", ".join(get_close_matches(name, known)) or "torchvision.models.list_models()"
        raise NetworkError(f"model.name: torchvision has no model {name!r}; nearest: {near}")
    builder = torchvision.models.get_model_builder(name)
    family = builder.__module__.split(".")[2]
    given: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if "weights_backbone" in inspect.signature(builder).parameters:
        given["weights_backbone"] = None  # torchvision would download them by default
    if name in _INCEPTIONS:
        trained = weights is not None
        given |= {"aux_logits": False, "init_weights": True, "transform_input": trained}
    if weights is None:
        model = builder(**given | arguments)
    else:
        entry = _trained_weights(name, weights)
        given["num_classes"] = len(entry.meta["categories"])
        if given["num_classes"] != num_classes and family == "detection":
            raise NetworkError(
                f"model.num_classes={num_classes}: the trained head of {name} has "
                f"{given['num_classes']} classes and cannot be resized; remove model.weights"
            )
        model = builder(**given | arguments)
        if weights_wanted():
            # The files of the Inceptions have the auxiliary outputs, too.
            model.load_state_dict(fetch(entry), strict=name not in _INCEPTIONS)
        resize_head(model, num_classes, outputs=given["num_classes"])
    if in_channels != 3:
        resize_input(model, in_channels, trained=weights is not None)
    if family == "segmentation":
        model.register_forward_hook(_main_output)
    return model  # type: ignore[no-any-return]


def _trained_weights(name: str, weights: str) -> Any:
    entries = torchvision.models.get_model_weights(name)
    if weights not in entries.__members__:
        known = ", ".join(entries.__members__) or "none"
        raise NetworkError(f"model.weights: {name} has no {weights!r}; it has: {known}")
    return entries[weights]


def _main_output(model: nn.Module, inputs: Any, output: Mapping[str, Tensor]) -> Tensor:
    return output["out"]


def from_timm(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    pretrained: bool = False,
    **arguments: Any,
) -> nn.Module:
    """Build timm's model `name`; `arguments` (such as `drop_rate`) go to `timm.create_model`."""
    timm = _imported("timm", "timm")
    if name.split(".")[0] not in timm.list_models():
        near = ", ".join(timm.list_models(f"*{name[:6]}*")[:3]) or "see timm.list_models()"
        raise NetworkError(f"model.name: timm has no model {name!r}; similar: {near}")
    given = {"num_classes": num_classes, "in_chans": in_channels, **arguments}
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=pretrained and weights_wanted(), **given
        )
    except OSError as error:
        raise WeightsError(f"model.pretrained: no weights for {name}: {error}") from error
    return model


class Logits(nn.Module):
    """A model of transformers that takes a batch's inputs and returns its logits.

    Inputs are a dict of named tensors (as a tokenizer makes them), token numbers (n, length), or
    images (n, C, H, W). The logits of token models are (n, length, classes).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.main_input: str = model.main_input_name  # type: ignore[assignment]
        self._follows = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def forward(
        self, inputs: Tensor | Mapping[str, Tensor], labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits; with labels the loss that the model computes itself, and the logits.

        Labels of a language model are the tokens that follow, place by place.
        """
        named = {self.main_input: inputs} if isinstance(inputs, Tensor) else inputs
        if labels is None:
            logits: Tensor = self.model(**named).logits
            return logits
        # Else transformers would move the labels by one place, which the data have done already.
        moved = {"shift_labels": labels} if self._follows else {}
        found = self.model(**named, labels=labels, **moved)
        return found.loss, found.logits


def from_transformers(
    name: str,
    num_classes: int,
    auto: str = "AutoModelForSequenceClassification",
    pretrained: bool = True,
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a model by the class `auto`: `name` is a folder, a name on the hub, or a model type.

    With `config` it is a model type, such as `bert`, built without weights from these values; no
    network is needed. Weights are read from .safetensors files only, and no code of the hub runs.
    """
    transformers = _imported("transformers", "'regimen[transformers]'")
    if not auto.startswith("AutoModelFor") or not hasattr(transformers, auto):
        raise NetworkError(f"model.auto: transformers has no {auto!r}; try AutoModelForCausalLM")
    kind = getattr(transformers, auto)
    causal = auto == "AutoModelForCausalLM"
    labels = {} if causal else {"num_labels": num_classes}
    failure: type[ValueError] = NetworkError
    try:
        if config is not None:
            sizes = {"vocab_size": num_classes} if causal else labels
            described = transformers.AutoConfig.for_model(name, **{**config, **sizes})
        else:
            described = transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=False, **labels
            )
        if config is not None or not pretrained or not weights_wanted():
            return Logits(kind.from_config(described, trust_remote_code=False))
        failure = WeightsError
        loaded: nn.Module = kind.from_pretrained(
            name,
            config=described,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # a head for other classes begins anew
            dtype=torch.float32,
        )
    except (OSError, ValueError, KeyError) as error:
        raise failure(f"model.name={name}: {' '.join(str(error).split())[:300]}") from error
    return Logits(loaded)


def _imported(package: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        message = f"model={package} needs the package {package}: pip install {install}"
        raise NetworkError(message) from None
