"""Build torch optimizers over parameter groups from an `optimizer` node of the config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from conf.errors import Problem, did_you_mean, raise_problems
from trainer.optimizers.param_groups import (
    Claim,
    ParamGroup,
    ParamGroupError,
    parse_rules,
    some,
)
from trainer.optimizers.selectors import parse_selector
from trainer.optimizers.steps import damped
from trainer.targets.instantiate import instantiate

SINGLE = "optimizer"  # the name of the only optimizer
# Optimizers whose fused kernels accept sharded parameters, and those that cannot train shards.
SHARDED_FUSED = (torch.optim.Adam, torch.optim.AdamW)
UNSHARDED = (torch.optim.Adafactor,)
OWN = (
    "param_groups",
    "params",
    "lr_scheduler",
)  # keys of a node that are not arguments of its target


@dataclass(frozen=True, slots=True)
class Section:
    """An optimizer of the config: the arguments of its target, and the keys in `OWN`."""

    name: str
    key: str
    target: dict[str, Any]
    own: Mapping[str, Any]


def sections(node: Mapping[str, Any], key: str, problems: list[Problem]) -> list[Section]:
    """Return the optimizers of a node: the node itself, or those under `optimizers`.

    A null entry is dropped. Hyper-parameters beside `optimizers` are the defaults of all of them.
    """
    if "optimizers" not in node:
        return [_section(SINGLE, key, node, problems)]
    several = node["optimizers"]
    if not isinstance(several, Mapping) or not any(several.values()):
        message = f"must be a dict of optimizers by name, not {several!r}"
        problems.append(Problem(f"{key}.optimizers", message))
        return []
    shared = {k: v for k, v in node.items() if k not in ("optimizers", *OWN)}
    found = []
    for name, child in several.items():
        child_key = f"{key}.optimizers.{name}"
        if isinstance(child, Mapping):
            found.append(_section(str(name), child_key, {**shared, **child}, problems))
        elif child is not None:
            problems.append(Problem(child_key, f"must be a node with a _target_, not {child!r}"))
    return found


def _section(name: str, key: str, node: Mapping[str, Any], problems: list[Problem]) -> Section:
    if not node.get("_target_"):
        problems.append(Problem(key, "has no _target_, such as torch.optim.AdamW"))
    target = {k: v for k, v in node.items() if k not in OWN}
    return Section(name, key, target, {k: node.get(k) for k in OWN})


def claims(
    found: Sequence[Section], node: Mapping[str, Any], key: str, problems: list[Problem]
) -> dict[str, Claim]:
    """Return which parameters each optimizer takes: those of `params`, else those of its rules.

    An optimizer with neither takes all that are left, and so does the last one without `params`.
    """
    shared = []
    if "optimizers" in node:
        shared = parse_rules(node.get("param_groups"), f"{key}.param_groups", problems)
    claimed = {}
    for section in found:
        rules = parse_rules(section.own["param_groups"], f"{section.key}.param_groups", problems)
        chosen = section.own["params"]
        claimed[section.name] = Claim(
            section.key,
            [*rules, *shared],
            None if chosen is None else parse_selector(chosen, f"{section.key}.params", problems),
            () if section is found[-1] else rules,
        )
    return claimed


def build(section: Section, groups: Sequence[ParamGroup], prefer_fused: bool) -> Optimizer:
    """Build one optimizer over its groups. Raises `ParamGroupError` for invalid options."""
    shards = {n: p for g in groups for n, p in g.parameters.items() if hasattr(p, "device_mesh")}
    resolved: list[dict[str, Any]] = [
        {"params": list(group.parameters.values()), "name": group.name} for group in groups
    ]
    if not (prefer_fused or shards or any(group.differs for group in groups)):
        return _construct(section.target, section.key, resolved)
    # Only an instance shows which hyper-parameters a group can have, and their defaults.
    probe = _construct(section.target, section.key, [nn.Parameter(torch.zeros(1, 1))])
    defaults = probe.defaults
    problems: list[Problem] = []
    for options, group in zip(resolved, groups, strict=True):
        options |= _resolve(group, defaults, problems)
    problems += _sharding_problems(section, probe, shards)
    raise_problems(problems, ParamGroupError)
    fused = prefer_fused and _takes_fused(defaults, resolved)
    fused = fused and (not shards or isinstance(probe, SHARDED_FUSED))
    if fused:
        groups_of_its_own = [dict(group) for group in resolved]
        built = _construct(section.target | {"fused": True}, section.key, groups_of_its_own)
        # torch 2.11's fused Adagrad runs on CPUs only and lacks this attribute, which all fused
        # optimizers for GPUs have.
        if hasattr(built, "_step_supports_amp_scaling"):
            return built
    return _construct(section.target, section.key, resolved)


def _takes_fused(defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether torch has a fused kernel and the node leaves the choice open."""
    open_choice = defaults.get("fused", True) is None and not defaults.get("foreach")
    # Fused SGD cannot apply dampening to a parameter whose first gradient comes later than others'.
    damps = any(damped({**defaults, **group}) for group in groups)
    return open_choice and not defaults.get("differentiable") and not damps


def _sharding_problems(
    section: Section, optimizer: Optimizer, shards: Mapping[str, Any]
) -> list[Problem]:
    """Return what an optimizer cannot do with sharded parameters."""
    problems = []
    kind = type(optimizer).__name__
    if shards and optimizer.defaults.get("fused") and not isinstance(optimizer, SHARDED_FUSED):
        message = f"torch has no fused kernel of {kind} for strategy=fsdp"
        problems.append(Problem(f"{section.key}.fused", message, "leave it out"))
    uneven = [n for n, p in shards.items() if p.ndim > 1 and len(p) % p.device_mesh.size()]
    if uneven and isinstance(optimizer, torch.optim.LBFGS):
        message = (
            f"{kind} flattens its parameters into one vector, which torch cannot do with uneven "
            f"shards: the rows of {some(uneven)} cannot be divided evenly among the processes"
        )
        problems.append(Problem(section.key, message, "strategy=ddp trains it"))
    return problems


def _construct(target: dict[str, Any], key: str, params: list[Any]) -> Optimizer:
    try:
        built = instantiate(target, params, _key_=key)
    except (RuntimeError, ArithmeticError, LookupError) as error:
        if hasattr(error, "exit_code"):
            raise
        name = "" if isinstance(error, RuntimeError) else f"{target['_target_']}: "
        raise ParamGroupError(Problem(key, f"{name}{error}")) from error
    if not isinstance(built, Optimizer):
        message = f"returned {built!r}, which is not a torch.optim.Optimizer"
        raise ParamGroupError(Problem(f"{key}._target_", message))
    return built


def _resolve(
    group: ParamGroup, defaults: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Return the hyper-parameters of a group that differ from the optimizer's defaults."""
    resolved: dict[str, Any] = {}
    for name, value in group.overrides.items():
        key, stem = f"{group.key}.{name}", name.removesuffix("_scale")
        if name in defaults:
            resolved[name] = _checked(key, value, defaults[name], problems)
        elif stem == name or not _is_number(defaults.get(stem)):
            message = (
                f"the optimizer has no hyper-parameter {name!r}, only {', '.join(defaults)},"
                " and lr_scale for a multiple of lr"
            )
            problems.append(Problem(key, message, did_you_mean(name, [*defaults, "lr_scale"])))
        elif stem in group.overrides:
            problems.append(Problem(key, f"{stem} is set as well", "remove one of the two"))
        else:
            resolved[stem] = defaults[stem] * _checked(key, value, 1.0, problems)
    if group.lr_factor != 1.0:
        resolved["lr"] = resolved.get("lr", defaults["lr"]) * group.lr_factor
    return resolved


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(key: str, value: Any, default: Any, problems: list[Problem]) -> Any:
    """Return a value of the same type as `default`; torch does not check the values of groups."""
    if isinstance(default, bool) and not isinstance(value, bool):
        problems.append(Problem(key, f"must be true or false, not {value!r}"))
    elif _is_number(default):
        if not _is_number(value) or not math.isfinite(value):
            problems.append(Problem(key, f"must be a number, not {value!r}"))
            return default
        if value < 0 <= default:
            problems.append(Problem(key, f"must be 0 or more, not {value!r}"))
    elif isinstance(default, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(default):
            problems.append(Problem(key, f"must be a list of {len(default)}, not {value!r}"))
            return default
        return tuple(value)
    return value
