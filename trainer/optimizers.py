"""One or several torch optimizers over one model, seen as one."""

from __future__ import annotations

import copy
import math
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.instantiate import instantiate
from trainer.optimizer_state import (
    Group,
    hyper_parameters,
    needs_closure,
    pack,
    unpack,
)
from trainer.param_groups import (
    DEFAULT,
    Claim,
    ParamGroup,
    ParamGroupError,
    complain,
    divide,
    parse_rules,
    some,
)
from trainer.param_selectors import candidates, nearest, parse_selector

__all__ = ["Group", "GroupRow", "Optimizers", "build_optimizers", "needs_closure", "target_nodes"]

SINGLE = "optimizer"  # the name of an optimizer that is alone
_OWN = ("param_groups", "params", "lr_scheduler")  # keys of a node that are not the target's


class GroupRow(NamedTuple):
    """A line of the plan's table; `lr` and `weight_decay` are None where there is none."""

    group: str
    optimizer: str
    tensors: int
    parameters: int
    lr: float | None
    weight_decay: float | None


class Optimizers:
    """Hold torch optimizers by name; the loop steps each of them directly.

    `names` gives each parameter the name that its state is saved under, `frozen` the parameters
    that are not trained. `configured` keeps the hyper-parameters of each optimizer's groups from
    before any schedule changed them, `lr_schedulers` the nodes of schedules that optimizers bring
    along, `keys` where in the config each optimizer stands.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        names: Mapping[Tensor, str],
        frozen: Mapping[str, Tensor] | None = None,
        lr_schedulers: Mapping[str, Any] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self.optimizers = dict(optimizers)
        self.keys = {name: name for name in optimizers} | dict(keys or {})
        self.names = dict(names)
        self.frozen = dict(frozen or {})
        self.lr_schedulers = dict(lr_schedulers or {})
        self.configured = {
            name: [copy.deepcopy(hyper_parameters(group)) for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }

    @classmethod
    def wrap(
        cls, optimizer: Optimizers | Optimizer | Mapping[str, Optimizer], model: nn.Module
    ) -> Optimizers:
        """Take plain torch optimizers over `model`; each trainable parameter must be in one.

        Raises `ParamGroupError` naming the parameters that are in none, in two, or not the model's.
        """
        if isinstance(optimizer, Optimizers):
            return optimizer
        optimizers = {SINGLE: optimizer} if isinstance(optimizer, Optimizer) else optimizer
        found = candidates(model)
        names: dict[Tensor, str] = {c.tensor: c.name for c in found}
        taken = [p for o in optimizers.values() for g in o.param_groups for p in g["params"]]
        counts: dict[Tensor, int] = {}
        for parameter in taken:
            counts[parameter] = counts.get(parameter, 0) + 1
        missing = [c.name for c in found if c.tensor.requires_grad and c.tensor not in counts]
        double = [names[p] for p, n in counts.items() if n > 1 and p in names]
        problems = []
        if any(p not in names for p in taken):
            problems.append("the optimizer has parameters that are not the model's")
        if missing:
            problems.append(f"no optimizer has {some(missing)}: add or freeze (requires_grad) them")
        if double:
            problems.append(f"two optimizers have {some(double)}")
        complain(problems)
        frozen = {c.name: c.tensor for c in found if c.tensor not in counts}
        return cls(optimizers, names, frozen)

    def items(self) -> ItemsView[str, Optimizer]:
        """Return the names and the torch optimizers."""
        return self.optimizers.items()

    def groups(self) -> list[Group]:
        """Return all parameter groups; their names are unique."""
        return [
            Group(self._group_name(name, i, options), name, options)
            for name, optimizer in self.optimizers.items()
            for i, options in enumerate(optimizer.param_groups)
        ]

    def _group_name(self, optimizer: str, index: int, options: Mapping[str, Any]) -> str:
        if "name" in options:
            return str(options["name"])
        prefix = [optimizer] if len(self.optimizers) > 1 else []
        if len(self.optimizers[optimizer].param_groups) > 1:
            prefix.append(f"group_{index}")
        return ".".join(prefix) or DEFAULT

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all groups."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def learning_rates(self) -> dict[str, float]:
        """Return each group's learning rate."""
        return {group.name: float(group.options["lr"]) for group in self.groups()}

    def table(self) -> list[GroupRow]:
        """Return the groups, and the frozen parameters, as lines for the plan."""
        rows = [
            GroupRow(
                group.name,
                self._title(group.optimizer_name),
                len(group.options["params"]),
                sum(p.numel() for p in group.options["params"]),
                _number(group.options.get("lr")),
                _number(group.options.get("weight_decay")),
            )
            for group in self.groups()
        ]
        if self.frozen:
            count = sum(p.numel() for p in self.frozen.values())
            rows.append(GroupRow("frozen", "-", len(self.frozen), count, None, None))
        return rows

    def _title(self, name: str) -> str:
        kind = type(self.optimizers[name]).__name__
        return kind if name == SINGLE else f"{name} ({kind})"

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyper-parameters by parameter name; the tensors are not copied."""
        return pack(self.optimizers, self.groups(), self.names, self.frozen)

    def load_state_dict(self, state: Mapping[str, Any], hyper_parameters: bool = True) -> list[str]:
        """Take over a `state_dict`, by name and to the bit; all of it or, with an error, nothing.

        `hyper_parameters=False` leaves learning rates and the like as the config has them. Returns
        remarks, for the log, on parameters frozen or released since. Raises `CheckpointError`
        for another type of optimizer, unknown or missing names, other shapes, other groups.
        """
        return unpack(
            self.optimizers, self.groups(), self.names, self.frozen, state, hyper_parameters
        )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class _Section:
    """An optimizer of the config: what its target gets, and which parameters it takes."""

    name: str
    key: str
    target: dict[str, Any]
    own: Mapping[str, Any]


def target_nodes(node: Mapping[str, Any], key: str = "optimizer") -> dict[str, dict[str, Any]]:
    """Return, by config key, the nodes whose targets are called with `params` and nothing else.

    Keys of ours (`param_groups`, ...) are stripped and shared hyper-parameters filled in, so that
    what is left can be bound against the target's signature.
    """
    return {section.key: section.target for section in _sections(node, key, [])}


def _sections(node: Mapping[str, Any], key: str, problems: list[str]) -> list[_Section]:
    if "optimizers" not in node:
        return [_section(SINGLE, key, node)]
    several = node["optimizers"]
    if not isinstance(several, Mapping):
        problems.append(f"{key}.optimizers must be a dict of optimizers, not {several!r}")
        return []
    shared = {k: v for k, v in node.items() if k not in ("optimizers", *_OWN)}
    found = []
    for name, child in several.items():
        child_key = f"{key}.optimizers.{name}"
        if isinstance(child, Mapping):
            found.append(_section(str(name), child_key, {**shared, **child}))
        elif child is not None:
            problems.append(f"{child_key} must be a node with a _target_, not {child!r}")
    if not found:
        problems.append(f"{key}.optimizers names no optimizer")
    return found


def _section(name: str, key: str, node: Mapping[str, Any]) -> _Section:
    target = {k: v for k, v in node.items() if k not in _OWN}
    return _Section(name, key, target, {k: node.get(k) for k in _OWN})


def build_optimizers(
    model: nn.Module, node: Mapping[str, Any], key: str = "optimizer"
) -> Optimizers:
    """Build the optimizers of a config's `optimizer` node over `model`.

    Freezes the parameters that a rule freezes. Raises `ParamGroupError` with all that is wrong.
    """
    problems: list[str] = []
    sections = _sections(node, key, problems)
    claims = _claims(sections, node, key, problems)
    problems += [f"{s.key} has no _target_" for s in sections if "_target_" not in s.target]
    complain(problems)
    division = divide(model, claims)
    optimizers = {s.name: _build(s, division.groups[s.name]) for s in sections}
    return Optimizers(
        optimizers,
        {c.tensor: c.name for c in candidates(model)},
        division.frozen,
        {s.name: s.own["lr_scheduler"] for s in sections if s.own["lr_scheduler"] is not None},
        {s.name: s.key for s in sections},
    )


def _claims(
    sections: list[_Section], node: Mapping[str, Any], key: str, problems: list[str]
) -> dict[str, Claim]:
    shared = []
    if "optimizers" in node:
        shared = parse_rules(node.get("param_groups"), f"{key}.param_groups", problems)
    claims = {}
    for section in sections:
        chosen = section.own["params"]
        rules = parse_rules(section.own["param_groups"], f"{section.key}.param_groups", problems)
        claims[section.name] = Claim(
            section.key,
            [*rules, *shared],
            None if chosen is None else parse_selector(chosen, f"{section.key}.params", problems),
            by_rules=bool(rules) and section is not sections[-1],
        )
    return claims


def _build(section: _Section, groups: list[ParamGroup]) -> Optimizer:
    # The defaults of a signature are known for certain only from an instance.
    defaults = _construct(section, [nn.Parameter(torch.zeros(1, 1))]).defaults
    problems: list[str] = []
    resolved = [
        {
            "params": list(group.parameters.values()),
            "name": group.name,
            **_resolve(group, defaults, problems),
        }
        for group in groups
    ]
    complain(problems)
    return _construct(section, resolved)


def _construct(section: _Section, params: list[Any]) -> Optimizer:
    try:
        built = instantiate(section.target, params, _key_=section.key)
    except (ValueError, TypeError, RuntimeError) as error:
        if hasattr(error, "exit_code"):
            raise
        raise ParamGroupError(f"{section.key}: {error}") from error
    if not isinstance(built, Optimizer):
        raise ParamGroupError(f"{section.key}._target_ makes no torch.optim.Optimizer: {built!r}")
    return built


def _resolve(
    group: ParamGroup, defaults: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Return the hyper-parameters of a group that differ from its optimizer's."""
    resolved: dict[str, Any] = {}
    for name, value in group.overrides.items():
        stem = name.removesuffix("_scale")
        if name in defaults:
            resolved[name] = _checked(f"{group.key}.{name}", value, defaults[name], problems)
        elif stem not in defaults or stem == name:
            known = [*defaults, "lr_scale"]
            problems.append(
                f"{group.key}.{name} is no hyper-parameter of the optimizer, which has"
                f" {', '.join(defaults)}{nearest(name, known)}"
            )
        elif stem in group.overrides:
            problems.append(f"{group.key} gives both {stem} and {name}: one of them decides")
        elif not _is_number(value) or not _is_number(defaults[stem]):
            problems.append(f"{group.key}.{name} must be a number, not {value!r}")
        else:
            resolved[stem] = defaults[stem] * _checked(f"{group.key}.{name}", value, 1.0, problems)
    if group.lr_factor != 1.0:
        resolved["lr"] = resolved.get("lr", defaults["lr"]) * group.lr_factor
    return resolved


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(key: str, value: Any, default: Any, problems: list[str]) -> Any:
    """Return a value of the same kind as `default`; torch does not look at those of groups."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            problems.append(f"{key} must be true or false, not {value!r}")
    elif _is_number(default):
        if not _is_number(value) or not math.isfinite(value):
            problems.append(f"{key} must be a number, not {value!r}")
            return default
        if value < 0 <= default:
            problems.append(f"{key} must be 0 or more, not {value!r}")
    elif isinstance(default, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(default):
            problems.append(f"{key} must be a list of {len(default)}, not {value!r}")
            return default
        return tuple(value)
    return value
