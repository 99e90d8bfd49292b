"""Models of transformers by name, which is no dependency: it is imported when one is built."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regimen.data.errors import import_package, shortened
from regimen.models.layers import NetworkError
from regimen.models.pretrained import weights_wanted
from regimen.trainer.errors import CheckpointError


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
            return self.model(**named).logits  # type: ignore[no-any-return]
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
    transformers = import_package("transformers", "transformers")
    if not auto.startswith("AutoModelFor") or not hasattr(transformers, auto):
        raise NetworkError(f"model.auto: transformers has no {auto!r}; try AutoModelForCausalLM")
    kind = getattr(transformers, auto)
    causal = auto == "AutoModelForCausalLM"
    sizes = {"vocab_size" if causal else "num_labels": num_classes}
    safe = {"trust_remote_code": False}
    failure: type[Exception] = NetworkError
    try:
        if config is not None:
            described = transformers.AutoConfig.for_model(name, **{**config, **sizes})
        else:
            given = safe if causal else safe | sizes
            described = transformers.AutoConfig.from_pretrained(name, **given)
        if config is not None or not pretrained or not weights_wanted():
            return Logits(kind.from_config(described, **safe))
        failure = CheckpointError
        # A head for other classes begins anew.
        options = {"use_safetensors": True, "ignore_mismatched_sizes": True, **safe}
        return Logits(kind.from_pretrained(name, config=described, dtype=torch.float32, **options))
    except (OSError, ValueError, KeyError) as error:
        raise failure(f"model.name={name}: {shortened(error)}") from error
