"""One or several torch optimizers of a model behind one interface, built from a node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence
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
    GroupRule,
    NamedParameter,
    OptimizerScope,
    ParamGroup,
    assign_groups,
    first_rule,
    named_parameters,
    parse_rules,
    parse_selector,
    refuse,
)
from regimen.trainer.optimizers.state import (
    State,
    TorchGroup,
    init_momentum_buffers,
    pack,
    supports_found_inf,
    unpack,
    uses_dampening,
)
from regimen.trainer.targets.instantiate import instantiate

T = TypeVar("T")
SINGLE = "optimizer"  # the name of the only optimizer
# Optimizers whose fused kernels accept sharded parameters, and those that cannot train shards.
SHARDED_FUSED = (torch.optim.Adam, torch.optim.AdamW)
UNSHARDED = (torch.optim.Adafactor,)
# Keys that are no arguments of the target.
SETTINGS = ("param_groups", "params", "lr_scheduler", "lr_per_samples")


class Section(NamedTuple):
    """An optimizer of the config: its target with arguments, and the values of `SETTINGS`."""

    name: str
    key: str
    target: dict[str, Any]
    param_groups: Any
    params: Any
    lr_scheduler: Any
    lr_per_samples: Any


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
        self._last_rates = list[Any]()  # of the groups, in the last update
        self._configured = [
            (_number(group.options.get("lr")), _number(group.options.get("weight_decay")))
            for group in self.groups()
        ]
        for optimizer in self.optimizers.values():
            groups = (optimizer.defaults, *optimizer.param_groups)  # some may be added later
            if isinstance(optimizer, SGD) and any(group.get("fused") for group in groups):
                optimizer.register_step_pre_hook(init_momentum_buffers)

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
        parameters = named_parameters(model, others)
        names: dict[Tensor, str] = {p.tensor: p.name for p in parameters}
        if isinstance(optimizer, Optimizer):
            optimizer = {SINGLE: optimizer}
        if not isinstance(optimizer, Optimizers):
            optimizer = cls(optimizer, names)

        uses = Counter[Tensor](optimizer.parameters())
        problems = []
        if any(p not in names for p in uses):
            problems.append(Problem("", "the optimizer has parameters that are not in the model"))
        missing = [p.name for p in parameters if p.tensor.requires_grad and p.tensor not in uses]
        if missing:
            problems.append(
                Problem(
                    "",
                    f"no optimizer has {truncated_list(missing)}",
                    "add them, or freeze them with requires_grad_(False)",
                )
            )
        repeated = [names[p] for p, count in uses.items() if count > 1 and p in names]
        if repeated:
            problems.append(Problem("", f"two groups have {truncated_list(repeated)}"))
        raise_problems(problems)
        return optimizer

    def items(self) -> ItemsView[str, Optimizer]:
        """Return the names and the torch optimizers."""
        return self.optimizers.items()

    def groups(self) -> list[TorchGroup]:
        """Return all parameter groups; their names are unique."""
        groups = []
        for optimizer_name, optimizer in self.optimizers.items():
            for i, options in enumerate(optimizer.param_groups):
                parts = []
                if len(self.optimizers) > 1:
                    parts.append(optimizer_name)
                if len(optimizer.param_groups) > 1:
                    parts.append(f"group_{i}")
                name = options.get("name", ".".join(parts) or DEFAULT)
                groups.append(TorchGroup(str(name), optimizer_name, options))
        return groups

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

    def record_rates(self) -> None:
        """Store the learning rates as those of the last update, without waiting for the device."""
        rates = [group["lr"] for o in self.optimizers.values() for group in o.param_groups]
        self._last_rates = [lr.clone() if isinstance(lr, Tensor) else lr for lr in rates]

    def learning_rates(self, used: bool = False) -> dict[str, float]:
        """Return each group's learning rate: that of the next update, or if `used` of the last.

        Waits for the device where a learning rate is a tensor.
        """
        groups = self.groups()
        if used and self._last_rates:
            last = zip(groups, self._last_rates, strict=False)
            return {group.name: float(lr) for group, lr in last}
        return {group.name: float(group.options["lr"]) for group in groups}

    def table(self) -> list[GroupRow]:
        """Return the groups as configured, and the frozen parameters, as rows of the plan."""
        rows = []
        for group, values in zip(self.groups(), self._configured, strict=False):
            title = type(self.optimizers[group.optimizer_name]).__name__
            if group.optimizer_name != SINGLE:
                title = f"{group.optimizer_name} ({title})"
            rows.append(GroupRow(group.name, title, *_counts(group.options["params"]), *values))
        if self.frozen:
            rows.append(GroupRow("frozen", "-", *_counts(self.frozen.values()), None, None))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return types, groups, hyper-parameters and state by name; the tensors are not copied."""
        return pack(self.optimizers, self.groups(), self.names, self.frozen)

    def load_state_dict(self, saved: State, hyper_parameters: bool = True) -> list[str]:
        """Load a `state_dict`; on an error nothing is changed. See `state.unpack`."""
        groups = self.groups()
        return unpack(self.optimizers, groups, self.names, self.frozen, saved, hyper_parameters)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | Tensor) else None


def _counts(parameters: Collection[Tensor]) -> tuple[int, int]:
    return len(parameters), sum(p.numel() for p in parameters)


def build_optimizers(
    model: nn.Module,
    node: Mapping[str, Any],
    prefer_fused: bool = False,
    others: Mapping[str, nn.Module] | None = None,
    batch_size: int | None = None,
) -> Optimizers:
    """Build the optimizers of an `optimizer` node over `model` and over `others` by name.

    Freezes the parameters of rules with `frozen`. `prefer_fused` selects torch's fused kernels
    where the node leaves the choice open. `batch_size`: the samples of an update, by which
    `lr_per_samples` scales learning rates. Raises `ConfigError`.
    """
    configured = sections(node)
    parameters = named_parameters(model, others)
    problems = list[Problem]()
    shared = []  # rules that hold within each of several optimizers
    if "optimizers" in node:
        with collect_problems(problems):
            shared = parse_rules(node.get("param_groups"), "optimizer.param_groups")
    scopes = {}
    for section in configured:
        with collect_problems(problems):
            rules = parse_rules(section.param_groups, f"{section.key}.param_groups")
            others_rule = GroupRule("", section.key)
            matches: Callable[[NamedParameter], object] = others_rule.accepts
            if section.params is not None:
                matches = parse_selector(section.params, f"{section.key}.params")
            elif rules and section is not configured[-1]:
                # Its rules say what it trains; the last optimizer takes what is left.
                matches = partial(first_rule, rules)
            scopes[section.name] = OptimizerScope(matches, [*rules, *shared, others_rule])
    raise_problems(problems)

    groups = assign_groups(model, parameters, scopes)
    optimizers = {}
    for section in configured:
        factor = _rate_factor(section, batch_size)
        optimizers[section.name] = _build(section, groups[section.name], prefer_fused, factor)
    return Optimizers(optimizers, {p.tensor: p.name for p in parameters}, configured)


def sections(node: Mapping[str, Any]) -> list[Section]:
    """Return the optimizers of a node: the node itself, or those under `optimizers`.

    A null entry is dropped. Hyper-parameters beside `optimizers` are the defaults of all of them.
    Raises `ConfigError`.
    """
    children = node.get("optimizers", {SINGLE: node})
    if not isinstance(children, Mapping) or not any(children.values()):
        refuse(
            "optimizer.optimizers",
            f"must be a dict of optimizers by name, not {children!r}: such as "
            "{critic: {_target_: torch.optim.Adam, lr: 1.0e-4, params: {match: '^critic'}}}",
        )
    defaults = {k: v for k, v in node.items() if k not in ("optimizers", *SETTINGS)}
    configured = []
    for name, child in children.items():
        if child is None:
            continue
        key = "optimizer" if child is node else f"optimizer.optimizers.{name}"
        if not isinstance(child, Mapping):
            refuse(key, f"must be a node with a _target_, not {child!r}")
        target = {k: v for k, v in {**defaults, **child}.items() if k not in SETTINGS}
        if not target.get("_target_"):
            refuse(key, "has no _target_, such as torch.optim.AdamW")
        settings = {k: child.get(k) for k in SETTINGS}
        if "lr_per_samples" not in child:
            settings["lr_per_samples"] = node.get("lr_per_samples")
        configured.append(Section(str(name), key, target, **settings))
    return configured


def _rate_factor(section: Section, batch_size: int | None) -> float:
    """Return what the learning rates of an optimizer are multiplied by: batch / lr_per_samples."""
    samples = section.lr_per_samples
    if samples is None:
        return 1.0
    key = f"{section.key}.lr_per_samples"
    if type(samples) is not int or samples < 1:
        refuse(key, f"must be a number of samples, an integer >= 1, not {samples!r}")
    if batch_size is None:
        refuse(key, "the number of samples of an update is not known", "give the rate itself")
    return batch_size / samples


def _build(
    section: Section, groups: Sequence[ParamGroup], prefer_fused: bool, rate_factor: float
) -> Optimizer:
    make = partial(construct, Optimizer, section.key)
    # Only an instance shows which hyper-parameters a group can have, and their defaults.
    probe = make(section.target, [nn.Parameter(torch.zeros(1, 1))])
    if section.lr_per_samples is not None and "lr" not in probe.defaults:
        refuse(f"{section.key}.lr_per_samples", "the optimizer has no learning rate to scale")
    problems = list[Problem]()
    param_groups = []
    for group in groups:
        options = {"params": list(group.parameters.values()), "name": group.name}
        values = _hyper_parameters(group, probe.defaults, problems)
        if rate_factor != 1.0:
            values["lr"] = values.get("lr", probe.defaults["lr"]) * rate_factor
        param_groups.append(options | values)
    raise_problems(problems)

    if prefer_fused and _may_fuse(probe, param_groups):
        fused = make(section.target | {"fused": True}, [dict(group) for group in param_groups])
        # Some devices have not all kernels, and torch 2.11's fused Adagrad runs on CPUs only.
        on_meta = any(p.is_meta for group in param_groups for p in group["params"])
        if on_meta or supports_found_inf(fused):
            return fused
    return make(section.target, param_groups)


def _may_fuse(probe: Optimizer, param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the config leaves the implementation open and torch's fused one can do it."""
    defaults = probe.defaults
    if defaults.get("fused", True) is not None:  # given, or the class has no such choice
        return False
    if defaults.get("foreach") or defaults.get("differentiable"):
        return False
    # Fused SGD cannot apply dampening to a parameter whose first gradient comes later than others'.
    if any(uses_dampening({**defaults, **group}) for group in param_groups):
        return False
    sharded = any(hasattr(p, "device_mesh") for group in param_groups for p in group["params"])
    return not sharded or isinstance(probe, SHARDED_FUSED)


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
        # An error that a user's function raises keeps its type.
        if hasattr(error, "exit_code") or "lr_lambda" in given:
            raise
        raise ConfigError(key, f"{node['_target_']}: {error}") from error
    if not isinstance(made, kind):
        refuse(f"{key}._target_", f"makes no {kind.__name__} but {made!r}")
    return made


def _hyper_parameters(
    group: ParamGroup, defaults: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Return the hyper-parameters of a group that differ from the optimizer's defaults."""
    values = {}
    overrides = group.rule.overrides
    for name, value in overrides.items():
        key = f"{group.rule.key}.{name}"
        stem = name.removesuffix("_scale")  # `lr_scale` is a multiple of `lr`
        is_scale = stem != name and type(defaults.get(stem)) in (int, float)
        if name not in defaults and not is_scale:
            message = f"the optimizer has no hyper-parameter {name!r}, only {', '.join(defaults)}"
            hint = did_you_mean(name, defaults) or "lr_scale is a multiple of lr"
            problems.append(Problem(key, message, hint))
            continue
        if is_scale and stem in overrides:
            problems.append(Problem(key, f"{stem} is set as well", "remove one of the two"))
            continue
        wanted = _mismatch(value, 1.0 if is_scale else defaults[name])
        if wanted is not None:
            problems.append(Problem(key, f"must be {wanted}, not {value!r}"))
        elif is_scale:
            values[stem] = defaults[stem] * value
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    if group.lr_factor != 1.0:
        values["lr"] = values.get("lr", defaults["lr"]) * group.lr_factor
    return values


def _mismatch(value: Any, default: Any) -> str | None:
    """Return what a value should be, of the default's type; torch does not check those of groups.

    None for a value that fits.
    """
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
