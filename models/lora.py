"""Low-rank adapters (LoRA) on models of transformers, by peft; imported when a model is built."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from regimen.conf.errors import truncated_list
from regimen.data.errors import import_package, short_line
from regimen.models.layers import NetworkError
from regimen.models.transformers_adapter import build as build_transformers
from regimen.trainer.checkpoints.borrowed import lend_by_default


def build(
    name: str,
    num_classes: int,
    rank: int = 16,
    alpha: float = 32,
    targets: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    auto: str = "AutoModelForCausalLM",
    pretrained: bool = True,
    config: Mapping[str, Any] | None = None,
    context: int | None = None,
) -> nn.Module:
    """Build a frozen model of transformers, whose `targets` are W + B A alpha / rank.

    A [rank, inputs] and B [outputs, rank] are trained, in the dtype of the model; B is zero at
    first. `name`, `num_classes`, `auto`, `pretrained`, `config` and `context` are those of
    `regimen.models.transformers_adapter.build`.

    targets: as peft takes them: "all-linear" (but for the output layer), ends of module names, or
        a regular expression for whole names.
    dropout: of the inputs of A; its masks depend on how an update is split.
    """
    if alpha <= 0:
        raise NetworkError("model.alpha", f"is {alpha}: the adapters would learn nothing")
    if not 0 <= dropout < 1:
        raise NetworkError("model.dropout", f"is {dropout}: expected at least 0 and below 1")
    peft = import_package("peft", "peft")
    model = build_transformers(name, num_classes, auto, pretrained, config, context)
    base: Any = model.model
    linear = []  # the ends of their names; read before adapters take the place of the layers
    names = []
    for layer_name, layer in base.named_modules():
        names.append(f".{layer_name}")
        if isinstance(layer, nn.Linear):
            linear.append(layer_name.rpartition(".")[2])
    tied = _tied_modules(base)
    given = targets if isinstance(targets, str) else list(targets)
    if not isinstance(given, str):
        for target in given:
            # peft is content if one of them matches.
            if not any(layer_name.endswith(f".{target}") for layer_name in names):
                raise _no_target(given, f": no module's name ends with {target!r}", name, linear)
    former = dict(model.named_parameters(remove_duplicate=False))
    try:
        adapter = peft.LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=given, lora_dropout=dropout
        )
        peft.inject_adapter_in_model(adapter, base)
    except re.error as error:
        raise _no_target(given, f" is no regular expression: {error}", name, linear) from error
    except (ValueError, TypeError) as error:
        reason = f" with rank {rank}: {short_line(error)}"
        key = "model.targets" if "arget" in str(error) else "model"
        raise _no_target(given, reason, name, linear, key) from error
    layer_type = peft.tuners.tuners_utils.BaseTunerLayer
    for layer_name, layer in base.named_modules():
        if isinstance(layer, layer_type) and layer_name in tied:
            raise NetworkError(
                "model.targets",
                f"{layer_name} shares its weight with another layer of {name}, which an adapter of "
                "one of them would part",
                "leave it out",
            )
    lend_by_default(model, former)
    return model


def _no_target(
    given: Any, reason: str, name: str, linear: Sequence[str], key: str = "model.targets"
) -> NetworkError:
    """Return the error that names the linear modules of a model."""
    ends = list(dict.fromkeys(linear))
    return NetworkError(
        key, f"{given!r}{reason}", f"linear modules of {name} are {truncated_list(ends, 12)}"
    )


def _tied_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules that share a parameter with another one."""
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(name)
    tied = set[str]()
    for names in owners.values():
        if len(names) > 1:
            tied.update(names)
    return tied
