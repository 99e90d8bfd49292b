"""One or several torch optimizers of a model behind one interface, built from a node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, ItemsView, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from regimen.conf.errors import (
    ConfigError,
    Problem,
    collect_problems,
    did_you_mean,
    raise_problems,
    truncated_list,
)
from regimen.trainer.optimizers.param_groups import (
    DEFAULT,
    Claim,
    GroupRule,
    ParamGroup,
    candidates,
    divide,
    first_rule,
    parse_rules,
    parse_selector,
    refuse,
)
from regimen.trainer.optimizers.state import begin_with_zeros, can_leave_out, damped, pack, unpack
from regimen.trainer.targets.instantiate import instantiate

T = TypeVar("T")
SINGLE = "optimizer"  # the name of the only optimizer
# Optimizers whose fused kernels accept sharded parameters, and those that cannot train shards.
SHARDED_FUSED = (torch.optim.Adam, torch.optim.AdamW)
UNSHARDED = (torch.optim.Adafactor,)
OWN = ("param_groups", "params", "lr_scheduler")  # keys that are not arguments of the target


class Section(NamedTuple):
    """An optimizer of the config: the arguments of its target, and the keys in `OWN`."""

    name: str
    key: str
    target: dict[str, Any]
    own: Mapping[str, Any]


class TorchGroup(NamedTuple):
    """A parameter group: its unique name, that of its optimizer, and torch's dict of the group."""

    name: str
    optimizer_name: str
    options: dict[str, Any]


class GroupRow(NamedTuple):
    """A row of the plan's table; `lr` and `weight_decay` are None where there is no such value."""

    group: str
    optimizer: str
    tensors: int
    parameters: int
    lr: float | None
    weight_decay: float | None


class Optimizers:
    """Hold torch optimizers by name; the loop steps each of them directly.

    `names` maps each parameter to the name that its state is saved under; those that no optimizer
    has are `frozen`. `sections` is what was configured.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        names: Mapping[Tensor, str],
        sections: Sequence[Section] = (),
    ) -> None:
        self.optimizers = dict(optimizers)
        self.names = dict(names)
        trained = {*self.parameters()}
        self.frozen = {name: p for p, name in names.items() if p not in trained}
        self.sections = {section.name: section for section in sections}
        self._used = list[Any]()  # the learning rates of the last update
        self._configured = [
            [_number(group.options.get(name)) for name in ("lr", "weight_decay")]
            for group in self.groups()
        ]
        for optimizer in self.optimizers.values():
            groups = (optimizer.defaults, *optimizer.param_groups)  # some may be added later
            if isinstance(optimizer, SGD) and any(group.get("fused") for group in groups):
                optimizer.register_step_pre_hook(begin_with_zeros)

    @classmethod
    def wrap(
        cls,
        optimizer: Optimizers | Optimizer | Mapping[str, Optimizer],
        model: nn.Module,
        others: Mapping[str, nn.Module] | None = None,
    ) -> Optimizers:
        """Wrap plain torch optimizers over `model`; each trainable parameter must be in one (I8).

        `others` are modules besides the model that are trained. Raises `ConfigError` with the
        parameters that are in no optimizer, in two, or not in the model.
        """
        found = candidates(model, others)
        names: dict[Tensor, str] = {c.tensor: c.name for c in found}
        if not isinstance(optimizer, Optimizers):
            optimizer = {SINGLE: optimizer} if isinstance(optimizer, Optimizer) else optimizer
            optimizer = cls(optimizer, names)
        taken = Counter[Tensor](optimizer.parameters())
        problems = []
        if any(p not in names for p in taken):
            problems.append(Problem("", "the optimizer has parameters that are not in the model"))
        if missing := [c.name for c in found if c.tensor.requires_grad and c.tensor not in taken]:
            hint = "add them, or freeze them with requires_grad_(False)"
            problems.append(Problem("", f"no optimizer has {truncated_list(missing)}", hint))
        if double := [names[p] for p, count in taken.items() if count > 1 and p in names]:
            problems.append(Problem("", f"two groups have {truncated_list(double)}"))
        raise_problems(problems)
        return optimizer

    def items(self) -> ItemsView[str, Optimizer]:
        """Return the names and the torch optimizers."""
        return self.optimizers.items()

    def groups(self) -> list[TorchGroup]:
        """Return all parameter groups; their names are unique."""
        found = []
        for name, optimizer in self.optimizers.items():
            prefix = [name] if len(self.optimizers) > 1 else []
            for i, options in enumerate(optimizer.param_groups):
                number = [f"group_{i}"] if len(optimizer.param_groups) > 1 else []
                known = options.get("name", ".".join([*prefix, *number]) or DEFAULT)
                found.append(TorchGroup(str(known), name, options))
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all groups."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None.

        torch's `zero_grad` is avoided: its profiler label costs more than the rest of it.
        """
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def keep_rates(self) -> None:
        """Store the learning rates as those of the last update, without waiting for the device."""
        rates = [g["lr"] for o in self.optimizers.values() for g in o.param_groups]
        self._used = [lr.clone() if isinstance(lr, Tensor) else lr for lr in rates]

    def learning_rates(self, used: bool = False) -> dict[str, float]:
        """Return each group's learning rate: that of the next update, or if `used` of the last."""
        if used and self._used:
            return {g.name: float(lr) for g, lr in zip(self.groups(), self._used, strict=False)}
        return {group.name: float(group.options["lr"]) for group in self.groups()}

    def table(self) -> list[GroupRow]:
        """Return the groups as configured, and the frozen parameters, as rows of the plan."""
        rows = []
        for (name, of, group), values in zip(self.groups(), self._configured, strict=False):
            kind = type(self.optimizers[of]).__name__
            title = kind if of == SINGLE else f"{of} ({kind})"
            rows.append(GroupRow(name, title, *_counts(group["params"]), *values))
        if self.frozen:
            rows.append(GroupRow("frozen", "-", *_counts(self.frozen.values()), None, None))
        return rows

    state_dict, load_state_dict = pack, unpack


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | Tensor) else None


def _counts(parameters: Collection[Tensor]) -> tuple[int, int]:
    return len(parameters), sum(p.numel() for p in parameters)


def build_optimizers(
    model: nn.Module,
    node: Mapping[str, Any],
    prefer_fused: bool = False,
    others: Mapping[str, nn.Module] | None = None,
) -> Optimizers:
    """Build the optimizers of an `optimizer` node over `model` and over `others` by name.

    Freezes the parameters of rules with `frozen`. `prefer_fused` selects torch's fused kernels
    where the node leaves the choice open. Raises `ConfigError`.
    """
    found, known = sections(node), candidates(model, others)
    problems = list[Problem]()
    shared = []  # rules that hold within each of several optimizers
    with collect_problems(problems):
        if "optimizers" in node:
            shared = parse_rules(node.get("param_groups"), "optimizer.param_groups")
    claims = {}
    for section in found:
        with collect_problems(problems):
            rules = parse_rules(section.own["param_groups"], f"{section.key}.param_groups")
            rest = GroupRule("", section.key)
            takes = rest.accepts
            if (chosen := section.own["params"]) is not None:
                takes = parse_selector(chosen, f"{section.key}.params")
            elif rules and section is not found[-1]:  # which takes what is left
                takes = partial(first_rule, rules)
            claims[section.name] = Claim(takes, [*rules, *shared, rest])
    raise_problems(problems)
    groups = divide(model, known, claims)
    built = {s.name: _build(s, groups[s.name], prefer_fused) for s in found}
    return Optimizers(built, {c.tensor: c.name for c in known}, found)


def sections(node: Mapping[str, Any]) -> list[Section]:
    """Return the optimizers of a node: the node itself, or those under `optimizers`.

    A null entry is dropped. Hyper-parameters beside `optimizers` are the defaults of all of them.
    """
    children = node.get("optimizers", {SINGLE: node})
    if not isinstance(children, Mapping) or not any(children.values()):
        refuse("optimizer.optimizers", f"must be a dict of optimizers by name, not {children!r}")
    shared = {k: v for k, v in node.items() if k not in ("optimizers", *OWN)}
    found = []
    for name, child in children.items():
        where = "optimizer" if child is node else f"optimizer.optimizers.{name}"
        if child is None:
            continue
        if not isinstance(child, Mapping):
            refuse(where, f"must be a node with a _target_, not {child!r}")
        target = {k: v for k, v in {**shared, **child}.items() if k not in OWN}
        if not target.get("_target_"):
            refuse(where, "has no _target_, such as torch.optim.AdamW")
        found.append(Section(str(name), where, target, {k: child.get(k) for k in OWN}))
    return found


def _build(section: Section, groups: Sequence[ParamGroup], prefer_fused: bool) -> Optimizer:
    make = partial(construct, Optimizer, section.key)
    resolved = [{"params": list(g.parameters.values()), "name": g.name} for g in groups]
    # Only an instance shows which hyper-parameters a group can have, and their defaults.
    probe = make(section.target, [nn.Parameter(torch.zeros(1, 1))])
    defaults = probe.defaults
    problems = list[Problem]()
    for options, group in zip(resolved, groups, strict=True):
        options |= _resolved(group, defaults, problems)
    raise_problems(problems)
    sharded = any(hasattr(p, "device_mesh") for g in groups for p in g.parameters.values())
    # The choice is open; fused SGD cannot apply dampening to a parameter whose first gradient
    # comes later than others'.
    if (
        prefer_fused
        and defaults.get("fused", True) is None
        and not (defaults.get("foreach") or defaults.get("differentiable"))
        and not any(damped({**defaults, **group}) for group in resolved)
        and (not sharded or isinstance(probe, SHARDED_FUSED))
    ):
        built = make(section.target | {"fused": True}, [dict(group) for group in resolved])
        # Some devices have not all kernels, and torch 2.11's fused Adagrad runs on CPUs only.
        on_meta = any(p.is_meta for group in groups for p in group.parameters.values())
        if on_meta or can_leave_out(built):
            return built
    return make(section.target, resolved)


def construct(
    kind: type[T],
    key: str,
    node: dict[str, Any],
    *args: Any,
    **given: Any,
) -> T:
    """Return the `kind` that a node makes; what torch raises becomes a ConfigError."""
    try:
        made = instantiate(node, *args, _key_=key, **given)
    except (RuntimeError, ArithmeticError, LookupError) as error:
        # An error of a user's function is theirs.
        if hasattr(error, "exit_code") or "lr_lambda" in given:
            raise
        raise ConfigError(key, f"{node['_target_']}: {error}") from error
    if not isinstance(made, kind):
        refuse(f"{key}._target_", f"makes no {kind.__name__} but {made!r}")
    return made


def _resolved(
    group: ParamGroup, defaults: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    # The hyper-parameters of a group that differ from the optimizer's defaults.
    resolved = {}
    given = group.rule.overrides
    for name, value in given.items():
        key, stem = f"{group.rule.key}.{name}", name.removesuffix("_scale")
        scaled = stem != name and type(defaults.get(stem)) in (int, float)
        if name not in defaults and not scaled:
            message = f"the optimizer has no hyper-parameter {name!r}, only {', '.join(defaults)}"
            hint = did_you_mean(name, defaults) or "lr_scale is a multiple of lr"
            problems.append(Problem(key, message, hint))
        elif scaled and stem in given:
            problems.append(Problem(key, f"{stem} is set as well", "remove one of the two"))
        elif need := _need(value, 1.0 if scaled else defaults[name]):
            problems.append(Problem(key, f"must be {need}, not {value!r}"))
        elif scaled:
            resolved[stem] = defaults[stem] * value
        else:
            resolved[name] = tuple(value) if isinstance(value, list) else value
    if group.lr_factor != 1.0:
        resolved["lr"] = resolved.get("lr", defaults["lr"]) * group.lr_factor
    return resolved


def _need(value: Any, default: Any) -> str | None:
    # What a value should be, as torch does not check those of groups: of the default's type.
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        if not (type(value) in (int, float) and math.isfinite(value)):
            return "a number"
        return "0 or more" if value < 0 <= default else None
    if isinstance(default, tuple | list):
        fits = isinstance(value, tuple | list) and len(value) == len(default)
        return None if fits else f"a list of {len(default)}"
    return None
