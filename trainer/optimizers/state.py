"""Optimizer state by parameter name, so that it is never loaded into another parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoints.plain import NotPlainError, plain, plain_part
from trainer.errors import CheckpointError
from trainer.optimizers.steps import needs_closure
from trainer.targets.renamed import present_path

# Counters that torch keeps on the host unless the optimizer runs captured or fused.
_ON_HOST = ("step", "mu_product")
# Options that select an implementation, which depends on the machine, and not the update.
_IMPLEMENTATION = ("foreach", "fused", "capturable")


class TorchGroup(NamedTuple):
    """A parameter group: its unique name, that of its optimizer, and torch's dict of the group."""

    name: str
    optimizer_name: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """Optimizer, group, shape and dtype of a parameter, of this run or as it was saved."""

    optimizer: str
    group: str
    shape: tuple[int, ...]
    dtype: str


def pack(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    frozen: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return types, groups, hyper-parameters and state; the tensors are shared, not copied."""
    return {
        "optimizers": {
            name: {
                "type": type_name(optimizer),
                "groups": {
                    group.name: _pack_group(group.options, names)
                    for group in groups
                    if group.optimizer_name == name
                },
                **_pack_state(name, optimizer, names),
            }
            for name, optimizer in optimizers.items()
        },
        "frozen": {name: _describe(tensor) for name, tensor in frozen.items()},
    }


def type_name(instance: object) -> str:
    """Return the import path of an object's class."""
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _pack_group(options: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    return {
        "hyper_parameters": plain_part(hyper_parameters(options)),
        "parameters": {names[p]: _describe(p) for p in options["params"]},
    }


def hyper_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a torch group that are not its parameters."""
    return {k: v for k, v in options.items() if k not in ("params", "param_names", "name")}


def _pack_state(
    name: str, optimizer: Optimizer, names: Mapping[Tensor, str]
) -> dict[str, dict[str, Any]]:
    state: dict[str, Any] = {}
    shared: dict[str, Any] = {}  # state that belongs to no parameter
    try:
        for owner, values in optimizer.state.items():
            if isinstance(owner, Tensor):
                state[names[owner]] = plain(dict(values))
            else:
                shared[str(owner)] = plain(values)
    except NotPlainError as error:
        raise CheckpointError(
            f"optimizer {name!r} ({type_name(optimizer)}) keeps a {error} in its state; only"
            " tensors and plain containers can be saved"
        ) from None
    return {"state": state, "shared": shared}


def unpack(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    frozen: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    restore_hyper_parameters: bool,
) -> list[str]:
    """Load what `pack` returned; raise and change nothing if anything does not match.

    Returns remarks on parameters that were frozen or unfrozen since the state was saved.
    """
    here = {
        names[p]: _place(group.optimizer_name, group.name, _describe(p))
        for group in groups
        for p in group.options["params"]
    }
    try:
        there = dict(_saved_places(saved))
        problems = [
            *_misfit_optimizers(optimizers, saved["optimizers"]),
            *_misfit_parameters(here, there, frozen, saved["frozen"]),
            *_misfit_orders(optimizers, groups, names, saved["optimizers"]),
        ]
        _refuse(problems)
        loads = [
            _prepare(optimizer, names, saved["optimizers"][name], there)
            for name, optimizer in optimizers.items()
        ]
        values = [_saved_hyper_parameters(group, saved["optimizers"]) for group in groups]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state is malformed: {error!r}") from None
    for load in loads:
        load.apply()
    if restore_hyper_parameters:
        for group, value in zip(groups, values, strict=True):
            group.options.update(value)
    return list(_remarks(here, there))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f" (+{len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"the optimizer state does not fit: {problems[0]}{more}")


def _place(optimizer: str, group: str, described: Mapping[str, Any]) -> _Place:
    return _Place(optimizer, group, tuple(described["shape"]), str(described["dtype"]))


def _saved_places(saved: Mapping[str, Any]) -> Iterator[tuple[str, _Place]]:
    for optimizer, section in saved["optimizers"].items():
        for group, content in section["groups"].items():
            for name, described in content["parameters"].items():
                yield name, _place(optimizer, group, described)


def _misfit_optimizers(
    optimizers: Mapping[str, Optimizer], saved: Mapping[str, Any]
) -> Iterator[str]:
    for name in saved.keys() - optimizers.keys():
        yield f"the checkpoint has an optimizer {name!r}, this run has {', '.join(optimizers)}"
    for name, optimizer in optimizers.items():
        if name not in saved:
            yield f"optimizer {name!r} is not in the checkpoint, which has {', '.join(saved)}"
        elif present_path(saved[name]["type"]) != type_name(optimizer):
            yield f"optimizer {name!r} is {type_name(optimizer)}, it was {saved[name]['type']}"


def _misfit_parameters(
    here: Mapping[str, _Place],
    there: Mapping[str, _Place],
    frozen_here: Mapping[str, Tensor],
    frozen_there: Mapping[str, Any],
) -> Iterator[str]:
    for name, place in here.items():
        if name in there:
            yield from _differences(name, place, there[name])
        elif name not in frozen_there:
            if not name.startswith("task."):  # older checkpoints do not have these
                yield f"parameter {name} (group {place.group}) is not in the checkpoint"
        elif tuple(frozen_there[name]["shape"]) != place.shape:
            yield _other_shape(name, place.shape, tuple(frozen_there[name]["shape"]))
    for name, place in there.items():
        if name in here:
            continue
        if name not in frozen_here:
            yield f"parameter {name} (group {place.group}) of the checkpoint is not in this run"
        elif tuple(frozen_here[name].shape) != place.shape:
            yield _other_shape(name, tuple(frozen_here[name].shape), place.shape)


def _differences(name: str, here: _Place, there: _Place) -> Iterator[str]:
    if here.shape != there.shape:
        yield _other_shape(name, here.shape, there.shape)
    if (here.optimizer, here.group) != (there.optimizer, there.group):
        yield (
            f"parameter {name} is in group {here.group!r} of {here.optimizer!r},"
            f" it was in {there.group!r} of {there.optimizer!r}"
        )


def _other_shape(name: str, here: tuple[int, ...], there: tuple[int, ...]) -> str:
    return f"parameter {name} has shape {list(here)}, it had {list(there)}"


def _misfit_orders(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    saved: Mapping[str, Any],
) -> Iterator[str]:
    """Yield optimizers whose state is one vector over all parameters, whose order has changed."""
    for group in groups:
        if group.optimizer_name not in saved or not needs_closure(optimizers[group.optimizer_name]):
            continue
        content = saved[group.optimizer_name]["groups"].get(group.name)
        if content and list(content["parameters"]) != [names[p] for p in group.options["params"]]:
            yield f"the parameters of {group.optimizer_name!r} are in another order"


def _remarks(here: Mapping[str, _Place], there: Mapping[str, _Place]) -> Iterator[str]:
    thawed = [name for name in here if name not in there]
    if thawed:
        yield f"unfrozen since the checkpoint, they begin without state: {', '.join(thawed)}"
    gone = [name for name in there if name not in here]
    if gone:
        yield f"frozen since the checkpoint, their state is dropped: {', '.join(gone)}"


def _saved_hyper_parameters(group: TorchGroup, saved: Mapping[str, Any]) -> dict[str, Any]:
    groups = saved[group.optimizer_name]["groups"]
    # A group that was frozen as a whole when it was saved keeps the values of this run.
    values = groups[group.name]["hyper_parameters"] if group.name in groups else {}
    return {name: value for name, value in values.items() if name not in _IMPLEMENTATION}


@dataclass(frozen=True, slots=True)
class _Load:
    """State that is ready to be assigned to an optimizer, which cannot fail any more."""

    optimizer: Optimizer
    states: dict[Tensor, dict[str, Any]]
    shared: dict[str, Any]

    def apply(self) -> None:
        state: dict[Any, Any] = self.optimizer.state
        for parameter, values in self.states.items():
            state.pop(parameter, None)
            if values:
                state[parameter] = values
        state.update(self.shared)


def _prepare(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    saved: Mapping[str, Any],
    there: Mapping[str, _Place],
) -> _Load:
    states = {}
    for group in optimizer.param_groups:
        on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[parameter]
            if name in there:  # else it was frozen, and begins without state
                states[parameter] = {
                    key: _like(value, parameter, on_host and key in _ON_HOST, there[name].dtype)
                    for key, value in saved["state"].get(name, {}).items()
                }
    return _Load(optimizer, states, dict(saved["shared"]))


def _like(value: Any, parameter: Tensor, on_host: bool, dtype: str) -> Any:
    """Copy a value of the state to the parameter's device, bit for bit.

    torch's own `load_state_dict` casts to the parameter's dtype, which loses bits. Here a value is
    cast only if the parameter itself had another `dtype` when it was saved.
    """
    if isinstance(value, Tensor):
        device = torch.device("cpu") if on_host else parameter.device
        same = dtype == str(parameter.dtype).removeprefix("torch.")
        cast = not same and value.dim() > 0 and value.is_floating_point()
        return value.detach().to(device, parameter.dtype if cast else value.dtype, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_like(v, parameter, on_host, dtype) for v in value)
    if isinstance(value, dict):
        return {k: _like(v, parameter, on_host, dtype) for k, v in value.items()}
    return value
