"""Models of the package transformers by name (not a dependency: `pip install transformers`)."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import NetworkError, WeightsError
from models.weights import weights_wanted


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


def build(
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
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        hint = "pip install 'regimen[transformers]'"
        raise NetworkError(f"model=transformers needs the package transformers: {hint}") from None
    if not auto.startswith("AutoModelFor") or not hasattr(transformers, auto):
        raise NetworkError(
            f"model.auto: transformers has no {auto!r}; such as AutoModelForCausalLM"
        )
    kind = getattr(transformers, auto)
    size = {"vocab_size": num_classes} if auto == "AutoModelForCausalLM" else {}
    labels = {} if size else {"num_labels": num_classes}
    try:
        if config is not None:
            described = transformers.AutoConfig.for_model(name, **{**config, **size, **labels})
        else:
            described = transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=False, **labels
            )
    except (OSError, ValueError, KeyError) as error:
        raise NetworkError(f"model.name={name}: {_line(error)}") from error
    if config is not None or not pretrained or not weights_wanted():
        return Logits(kind.from_config(described, trust_remote_code=False))
    try:
        loaded: nn.Module = kind.from_pretrained(
            name,
            config=described,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # a head for other classes begins anew
            dtype=torch.float32,
        )
    except (OSError, ValueError) as error:
        raise WeightsError(f"model.name={name}: {_line(error)}") from error
    return Logits(loaded)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
