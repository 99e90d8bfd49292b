"""One or several torch optimizers of a model behind one interface, built from a node."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from conf.errors import Problem, did_you_mean, raise_problems
from trainer.optimizers.param_groups import (
    DEFAULT,
    Candidate,
    Claim,
    ParamGroup,
    ParamGroupError,
    candidates,
    divide,
    parse_rules,
    parse_selector,
    some,
)
from trainer.optimizers.state import TorchGroup, hyper_parameters, pack, unpack
from trainer.optimizers.steps import begin_with_zeros, damped
from trainer.targets.instantiate import instantiate

SINGLE = "optimizer"  # the name of the only optimizer
# Optimizers whose fused kernels accept sharded parameters, and those that cannot train shards.
SHARDED_FUSED = (torch.optim.Adam, torch.optim.AdamW)
UNSHARDED = (torch.optim.Adafactor,)
OWN = ("param_groups", "params", "lr_scheduler")  # keys that are not arguments of the target


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

    `names` maps each parameter to the name that its state is saved under; `frozen` holds the
    parameters that are not trained. `configured` keeps the hyper-parameters of each optimizer's
    groups as they were before any schedule changed them. `lr_schedulers` holds the schedule nodes
    of single optimizers, `keys` the config key of each optimizer.
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
        self._used: list[Any] = []  # the learning rates of the last update
        self.configured = {
            name: [copy.deepcopy(hyper_parameters(group)) for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }
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
        """Wrap plain torch optimizers over `model`; each trainable parameter must be in one.

        `others` are modules besides the model that are trained. Raises `ParamGroupError` with the
        parameters that are in no optimizer, in two, or not in the model.
        """
        found = candidates(model, others)
        if isinstance(optimizer, Optimizers):
            apart = {p for module in (others or {}).values() for p in module.parameters()}
            forgotten = [c for c in found if c.tensor in apart - optimizer.names.keys()]
            raise_problems(_membership_problems(forgotten, []), ParamGroupError)
            return optimizer
        optimizers = {SINGLE: optimizer} if isinstance(optimizer, Optimizer) else optimizer
        taken = [p for o in optimizers.values() for g in o.param_groups for p in g["params"]]
        raise_problems(_membership_problems(found, taken), ParamGroupError)
        names: dict[Tensor, str] = {c.tensor: c.name for c in found}
        members = set(taken)
        return cls(optimizers, names, {c.name: c.tensor for c in found if c.tensor not in members})

    def items(self) -> ItemsView[str, Optimizer]:
        """Return the names and the torch optimizers."""
        return self.optimizers.items()

    def groups(self) -> list[TorchGroup]:
        """Return all parameter groups; their names are unique."""
        return [
            TorchGroup(self._group_name(name, i, options), name, options)
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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all groups with their names in the model."""
        for parameter in self.parameters():
            yield self.names[parameter], parameter

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None.

        torch's `zero_grad` is avoided: its profiler label costs more than the rest of it.
        """
        for optimizer in self.optimizers.values():
            if type(optimizer).zero_grad is not Optimizer.zero_grad:
                optimizer.zero_grad()  # a subclass may do more
                continue
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
        for group in self.groups():
            optimizer = self.optimizers[group.optimizer_name]
            kind, parameters = type(optimizer).__name__, group.options["params"]
            index = next(i for i, g in enumerate(optimizer.param_groups) if g is group.options)
            known = self.configured[group.optimizer_name][index:] or [group.options]
            title = kind if group.optimizer_name == SINGLE else f"{group.optimizer_name} ({kind})"
            values = [known[0].get(name) for name in ("lr", "weight_decay")]
            lr, weight_decay = (None if value is None else float(value) for value in values)
            count = sum(p.numel() for p in parameters)
            rows.append(GroupRow(group.name, title, len(parameters), count, lr, weight_decay))
        if self.frozen:
            count = sum(p.numel() for p in self.frozen.values())
            rows.append(GroupRow("frozen", "-", len(self.frozen), count, None, None))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyper-parameters by parameter name; the tensors are not copied."""
        return pack(self.optimizers, self.groups(), self.names, self.frozen)

    def load_state_dict(self, state: Mapping[str, Any], hyper_parameters: bool = True) -> list[str]:
        """Load a `state_dict` by parameter name, bit for bit; on an error nothing is changed.

        `hyper_parameters=False` keeps the hyper-parameters of the config, such as learning rates.
        Returns remarks, for the log, on parameters that were frozen or unfrozen since. Raises
        `CheckpointError` for another type of optimizer, unknown or missing names, other shapes,
        other groups.
        """
        return unpack(
            self.optimizers, self.groups(), self.names, self.frozen, state, hyper_parameters
        )


def _membership_problems(found: Sequence[Candidate], taken: Sequence[Tensor]) -> Iterator[Problem]:
    # The parameters of a model against those of plain optimizers (I8).
    names: dict[Tensor, str] = {c.tensor: c.name for c in found}
    counts = Counter(taken)
    missing = [c.name for c in found if c.tensor.requires_grad and c.tensor not in counts]
    double = [names[p] for p, count in counts.items() if count > 1 and p in names]
    if any(p not in names for p in counts):
        yield Problem("", "the optimizer has parameters that are not in the model")
    if missing:
        hint = "add them, or freeze them with requires_grad_(False)"
        yield Problem("", f"no optimizer has {some(missing)}", hint)
    if double:
        yield Problem("", f"two groups have {some(double)}")


def build_optimizers(
    model: nn.Module,
    node: Mapping[str, Any],
    key: str = "optimizer",
    prefer_fused: bool = False,
    others: Mapping[str, nn.Module] | None = None,
) -> Optimizers:
    """Build the optimizers of an `optimizer` node over `model` and over `others` by name.

    Freezes the parameters of rules with `frozen`. `prefer_fused` selects torch's fused kernels
    where the node leaves the choice open. Raises `ParamGroupError` with all problems.
    """
    problems: list[Problem] = []
    found = sections(node, key, problems)
    shared = []  # rules that hold within each of several optimizers
    if "optimizers" in node:
        shared = parse_rules(node.get("param_groups"), f"{key}.param_groups", problems)
    claims = {}
    for section in found:
        rules = parse_rules(section.own["param_groups"], f"{section.key}.param_groups", problems)
        chosen = section.own["params"]
        claims[section.name] = Claim(
            section.key,
            [*rules, *shared],
            None if chosen is None else parse_selector(chosen, f"{section.key}.params", problems),
            () if section is found[-1] else rules,  # the last one takes what is left
        )
    raise_problems(problems, ParamGroupError)
    groups, frozen = divide(model, claims, others)
    return Optimizers(
        {s.name: _build(s, groups[s.name], prefer_fused) for s in found},
        {c.tensor: c.name for c in candidates(model, others)},
        frozen,
        {s.name: s.own["lr_scheduler"] for s in found if s.own["lr_scheduler"] is not None},
        {s.name: s.key for s in found},
    )


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
    several = node.get("optimizers")
    children = {(SINGLE, key): node}
    if "optimizers" in node:
        if not isinstance(several, Mapping) or not any(several.values()):
            message = f"must be a dict of optimizers by name, not {several!r}"
            problems.append(Problem(f"{key}.optimizers", message))
            return []
        children = {(str(n), f"{key}.optimizers.{n}"): c for n, c in several.items()}
    shared = {k: v for k, v in node.items() if k not in ("optimizers", *OWN)}
    found = []
    for (name, where), child in children.items():
        if isinstance(child, Mapping):
            whole = {**shared, **child}
            if not whole.get("_target_"):
                message = "has no _target_, such as torch.optim.AdamW"
                problems.append(Problem(where, message))
            target = {k: v for k, v in whole.items() if k not in OWN}
            found.append(Section(name, where, target, {k: child.get(k) for k in OWN}))
        elif child is not None:
            problems.append(Problem(where, f"must be a node with a _target_, not {child!r}"))
    return found


def _build(section: Section, groups: Sequence[ParamGroup], prefer_fused: bool) -> Optimizer:
    shards = {n: p for g in groups for n, p in g.parameters.items() if hasattr(p, "device_mesh")}
    resolved: list[dict[str, Any]] = [
        {"params": list(group.parameters.values()), "name": group.name} for group in groups
    ]
    if not (prefer_fused or shards or any(g.overrides or g.lr_factor != 1.0 for g in groups)):
        return _construct(section.target, section.key, resolved)
    # Only an instance shows which hyper-parameters a group can have, and their defaults.
    probe = _construct(section.target, section.key, [nn.Parameter(torch.zeros(1, 1))])
    problems: list[Problem] = []
    for options, group in zip(resolved, groups, strict=True):
        options |= _resolved(group, probe.defaults, problems)
    problems += _sharding_problems(section, probe, shards)
    raise_problems(problems, ParamGroupError)
    if prefer_fused and _takes_fused(probe, resolved, shards):
        groups_of_its_own = [dict(group) for group in resolved]
        built = _construct(section.target | {"fused": True}, section.key, groups_of_its_own)
        # torch 2.11's fused Adagrad runs on CPUs only and lacks this attribute, which all fused
        # optimizers for GPUs have.
        if hasattr(built, "_step_supports_amp_scaling"):
            return built
    return _construct(section.target, section.key, resolved)


def _takes_fused(
    probe: Optimizer, groups: Sequence[Mapping[str, Any]], shards: Mapping[str, Any]
) -> bool:
    # Whether torch has a fused kernel and the node leaves the choice open.
    defaults = probe.defaults
    open_choice = defaults.get("fused", True) is None and not defaults.get("foreach")
    # Fused SGD cannot apply dampening to a parameter whose first gradient comes later than others'.
    damps = any(damped({**defaults, **group}) for group in groups)
    whole = not shards or isinstance(probe, SHARDED_FUSED)
    return open_choice and not defaults.get("differentiable") and not damps and whole


def _sharding_problems(
    section: Section, optimizer: Optimizer, shards: Mapping[str, Any]
) -> Iterator[Problem]:
    kind = type(optimizer).__name__
    if shards and optimizer.defaults.get("fused") and not isinstance(optimizer, SHARDED_FUSED):
        message = f"torch has no fused kernel of {kind} for strategy=fsdp"
        yield Problem(f"{section.key}.fused", message, "leave it out")
    uneven = [n for n, p in shards.items() if p.ndim > 1 and len(p) % p.device_mesh.size()]
    if uneven and isinstance(optimizer, torch.optim.LBFGS):
        message = (
            f"{kind} flattens its parameters into one vector, which torch cannot do with uneven "
            f"shards: the rows of {some(uneven)} cannot be divided evenly among the processes"
        )
        yield Problem(section.key, message, "strategy=ddp trains it")


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


def _resolved(
    group: ParamGroup, defaults: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    # The hyper-parameters of a group that differ from the optimizer's defaults.
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
    # torch does not check the values of groups: they are of the same type as the default.
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
