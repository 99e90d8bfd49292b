"""One or several torch optimizers of a model behind one interface."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from conf.errors import Problem, raise_problems
from trainer.optimizers.nodes import SINGLE, build, claims, sections
from trainer.optimizers.param_groups import DEFAULT, ParamGroupError, divide, some
from trainer.optimizers.selectors import Candidate, candidates
from trainer.optimizers.state import TorchGroup, hyper_parameters, pack, unpack
from trainer.optimizers.steps import begin_with_zeros, needs_closure

__all__ = [
    "GroupRow",
    "Optimizers",
    "build_optimizers",
    "needs_closure",
]


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

    def keep_rates(self) -> None:
        """Store the learning rates as those of the last update, without waiting for the device."""
        rates = [g["lr"] for o in self.optimizers.values() for g in o.param_groups]
        self._used = [lr.clone() if isinstance(lr, Tensor) else lr for lr in rates]

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

    def learning_rates(self, used: bool = False) -> dict[str, float]:
        """Return each group's learning rate: that of the next update, or if `used` of the last."""
        if used and self._used:
            return {g.name: float(lr) for g, lr in zip(self.groups(), self._used, strict=False)}
        return {group.name: float(group.options["lr"]) for group in self.groups()}

    def table(self) -> list[GroupRow]:
        """Return the groups as configured, and the frozen parameters, as rows of the plan."""
        rows = [
            self._row(name, i, options)
            for name, optimizer in self.optimizers.items()
            for i, options in enumerate(optimizer.param_groups)
        ]
        if self.frozen:
            count = sum(p.numel() for p in self.frozen.values())
            rows.append(GroupRow("frozen", "-", len(self.frozen), count, None, None))
        return rows

    def _row(self, name: str, index: int, options: Mapping[str, Any]) -> GroupRow:
        known = self.configured[name]
        configured = known[index] if index < len(known) else options
        return GroupRow(
            self._group_name(name, index, options),
            self._title(name),
            len(options["params"]),
            sum(p.numel() for p in options["params"]),
            _number(configured.get("lr")),
            _number(configured.get("weight_decay")),
        )

    def _title(self, name: str) -> str:
        kind = type(self.optimizers[name]).__name__
        return kind if name == SINGLE else f"{name} ({kind})"

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


def _membership_problems(found: Sequence[Candidate], taken: Sequence[Tensor]) -> list[Problem]:
    """Compare the parameters of a model with those of plain optimizers (I8)."""
    names: dict[Tensor, str] = {c.tensor: c.name for c in found}
    counts = Counter(taken)
    missing = [c.name for c in found if c.tensor.requires_grad and c.tensor not in counts]
    double = [names[p] for p, count in counts.items() if count > 1 and p in names]
    problems = []
    if any(p not in names for p in counts):
        problems.append(Problem("", "the optimizer has parameters that are not in the model"))
    if missing:
        hint = "add them, or freeze them with requires_grad_(False)"
        problems.append(Problem("", f"no optimizer has {some(missing)}", hint))
    if double:
        problems.append(Problem("", f"two groups have {some(double)}"))
    return problems


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


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
    claimed = claims(found, node, key, problems)
    raise_problems(problems, ParamGroupError)
    division = divide(model, claimed, others)
    return Optimizers(
        {s.name: build(s, division.groups[s.name], prefer_fused) for s in found},
        {c.tensor: c.name for c in candidates(model, others)},
        division.frozen,
        {s.name: s.own["lr_scheduler"] for s in found if s.own["lr_scheduler"] is not None},
        {s.name: s.key for s in found},
    )
