"""Tensor parallelism: which layers a plan splits over processes, and how."""

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from regimen.conf.errors import Problem, raise_problems, truncated_list
from regimen.trainer.errors import ModelError

PLAN = "strategy.tensor_parallel.plan"
# The styles of torch, each with the size that it splits of a Linear and of an Embedding. `_rep`:
# the input or the output is replicated, that is whole on every process.
_COLUMNS = ("out_features", "embedding_dim")
_ROWS = ("in_features", "num_embeddings")
STYLES = {
    "colwise": _COLUMNS,
    "colwise_rep": _COLUMNS,
    "rowwise": _ROWS,
    "rowwise_rep": _ROWS,
}
# The names in the plans of transformers.
_ALIASES = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "rowwise",
}


def tensor_styles(
    model: nn.Module, plan: Mapping[str, str] | Literal["auto"], size: int
) -> dict[str, str]:
    """Return the modules that a plan splits over `size` processes, each with its style.

    `plan`: a style by pattern of names, or the model's own. Raises ModelError for what torch cannot
    split, and for a pattern that matches nothing.
    """
    plan = _own_plan(model) if isinstance(plan, str) else plan
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    styles = dict[str, str]()
    problems: list[Problem] = []
    for pattern, given in plan.items():
        style = _ALIASES.get(given, given)
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if style not in STYLES:
            problems.append(
                Problem(
                    PLAN,
                    f"{pattern}: there is no style {given!r} here",
                    f"there are {', '.join(STYLES)}",
                )
            )
        elif not names:
            patterns = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in layers))
            problems.append(
                Problem(
                    PLAN,
                    f"{pattern}: the model has no Linear or Embedding of such a name",
                    f"there are {truncated_list(patterns) or 'none'}",
                )
            )
        else:
            styles |= dict.fromkeys(names, style)
    problems += _uneven(layers, styles, size)
    problems += _tied(model, layers, styles)
    raise_problems(problems, ModelError)
    return styles


def _uneven(layers: Mapping[str, Any], styles: Mapping[str, str], size: int) -> list[Problem]:
    """Return a problem if the split dimension of a layer is no multiple of `size`."""
    uneven: dict[str, str] = {}  # the dimension by the name of the layer
    for name, style in styles.items():
        of_linear, of_embedding = STYLES[style]
        dimension = of_embedding if isinstance(layers[name], nn.Embedding) else of_linear
        if getattr(layers[name], dimension) % size:
            uneven[name] = dimension
    if not uneven:
        return []
    split = ", ".join(dict.fromkeys(uneven.values()))
    message = f"{truncated_list([*uneven])}: {split} cannot be split evenly over {size} processes"
    return [Problem(PLAN, message, "leave it out, or choose another size")]


def _tied(
    model: nn.Module, layers: Mapping[str, nn.Module], styles: Mapping[str, str]
) -> list[Problem]:
    """Return a problem if a split layer shares a parameter with another module."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = [name for name in styles if any(uses[id(p)] > 1 for p in layers[name].parameters())]
    if not tied:
        return []
    message = f"{truncated_list(tied)}: its weight is another module's, too, and would no longer be"
    return [Problem(PLAN, message, "leave it out")]


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Return the patterns of a model's own plan, as in transformers, that match something in it."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for name, module in model.named_modules():
        own = getattr(module, "tp_plan", None)
        if own:
            root = f"{name}." if name else ""
            plan = {root + pattern: style for pattern, style in own.items()}
            return {p: style for p, style in plan.items() if any(fnmatchcase(n, p) for n in names)}
    raise ModelError(
        PLAN,
        "auto: the model has no plan of its own",
        "give styles by patterns of names, such as {blocks.*.mlp.up: colwise}",
    )
