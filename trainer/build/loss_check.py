"""Call torch's losses on two tiny samples: torch checks their arguments only when called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from conf.errors import ConfigError, Problem
from trainer.targets.instantiate import instantiate, locate

_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_BY_VALUE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
)


def loss_problems(node: Any, key: str) -> Iterator[Problem]:
    """Yield a problem for each loss in `node` that torch would refuse in the first update."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    if "_target_" in node and locate(node["_target_"]) in (*_BY_CLASS, *_BY_VALUE):
        try:
            _try(instantiate(node, _key_=key))
        except ConfigError:  # of its constructor: reported with the task's
            pass
        except (ValueError, RuntimeError) as error:
            yield Problem(key, f"{node['_target_']}: {error}")
        return
    for name, child in node.items():
        yield from loss_problems(child, f"{key}.{name}")


def _try(loss: nn.Module) -> None:
    weight = getattr(loss, "weight", None)
    if weight is None:
        weight = getattr(loss, "pos_weight", None)
    output = torch.zeros(2, 3 if weight is None or not weight.ndim else len(weight))
    by_class = isinstance(loss, _BY_CLASS)
    loss(output, torch.zeros(2, dtype=torch.int64) if by_class else torch.zeros_like(output))
