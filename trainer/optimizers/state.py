"""Optimizer state by parameter name, so that it is never loaded into another parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoints.archive import NotPlainError, plain, plain_part
from trainer.errors import CheckpointError
from trainer.optimizers.steps import needs_closure

# Counters that torch keeps on the host unless the optimizer runs captured or fused.
_ON_HOST = ("step", "mu_product")
# Options that select an implementation, which depends on the machine, and not the update.
_IMPLEMENTATION = ("foreach", "fused", "capturable")


class TorchGroup(NamedTuple):
    """A parameter group: its unique name, that of its optimizer, and torch's dict of the group."""

    name: str
    optimizer_name: str
    options: dict[str, Any]


class _Place(NamedTuple):
    # Where a parameter is, in this run or as it was saved.
    optimizer: str
    group: str
    shape: tuple[int, ...]
    dtype: str


def type_name(instance: object) -> str:
    """Return the import path of an object's class."""
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def hyper_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a torch group that are not its parameters."""
    return {k: v for k, v in options.items() if k not in ("params", "param_names", "name")}


def pack(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    frozen: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return types, groups, hyper-parameters and state; the tensors are shared, not copied."""
    packed: dict[str, Any] = {
        name: {"type": type_name(optimizer), "groups": {}, **_pack_state(name, optimizer, names)}
        for name, optimizer in optimizers.items()
    }
    for group in groups:
        packed[group.optimizer_name]["groups"][group.name] = {
            "hyper_parameters": plain_part(hyper_parameters(group.options)),
            "parameters": {names[p]: _described(p) for p in group.options["params"]},
        }
    described = {name: _described(tensor) for name, tensor in frozen.items()}
    return {"optimizers": packed, "frozen": described}


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _pack_state(name: str, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
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
        names[p]: _place(group.optimizer_name, group.name, _described(p))
        for group in groups
        for p in group.options["params"]
    }
    fixed = {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    try:
        sections = saved["optimizers"]
        there = {
            name: _place(optimizer, group, described)
            for optimizer, section in sections.items()
            for group, content in section["groups"].items()
            for name, described in content["parameters"].items()
        }
        fixed_there = {name: tuple(was["shape"]) for name, was in saved["frozen"].items()}
        problems = [
            *_other_optimizers(optimizers, groups, names, sections),
            *_other_parameters(here, there, fixed, fixed_there),
        ]
        if problems:
            more = f" (+{len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckpointError(f"the optimizer state does not fit: {problems[0]}{more}")
        states = {
            name: _state(optimizer, names, sections[name]["state"], there)
            for name, optimizer in optimizers.items()
        }
        # A group that was frozen as a whole when it was saved keeps the values of this run.
        options = [
            dict(there_of[group.name]["hyper_parameters"]) if group.name in there_of else {}
            for group in groups
            for there_of in [sections[group.optimizer_name]["groups"]]
        ]
        shared = {name: dict(sections[name]["shared"]) for name in optimizers}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state is malformed: {error!r}") from None
    for name, optimizer in optimizers.items():
        _assign(optimizer.state, states[name], shared[name])
    if restore_hyper_parameters:
        for group, values in zip(groups, options, strict=True):
            group.options.update({k: v for k, v in values.items() if k not in _IMPLEMENTATION})
    thawed = [name for name in here if name not in there]
    gone = [name for name in there if name not in here]
    remarks = {
        "unfrozen since the checkpoint, they begin without state": thawed,
        "frozen since the checkpoint, their state is dropped": gone,
    }
    return [f"{remark}: {', '.join(of)}" for remark, of in remarks.items() if of]


def _assign(
    state: dict[Any, Any], found: Mapping[Tensor, dict[str, Any]], shared: Mapping[str, Any]
) -> None:
    for parameter, values in found.items():
        state.pop(parameter, None)
        if values:
            state[parameter] = values
    state.update(shared)


def _place(optimizer: str, group: str, described: Mapping[str, Any]) -> _Place:
    return _Place(optimizer, group, tuple(described["shape"]), str(described["dtype"]))


def _other_optimizers(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    saved: Mapping[str, Any],
) -> Iterator[str]:
    for name in saved.keys() - optimizers.keys():
        yield f"the checkpoint has an optimizer {name!r}, this run has {', '.join(optimizers)}"
    for name, optimizer in optimizers.items():
        if name not in saved:
            yield f"optimizer {name!r} is not in the checkpoint, which has {', '.join(saved)}"
        elif saved[name]["type"] != type_name(optimizer):
            yield f"optimizer {name!r} is {type_name(optimizer)}, it was {saved[name]['type']}"
    for group in groups:  # LBFGS: its state is one vector over all parameters
        if group.optimizer_name in saved and needs_closure(optimizers[group.optimizer_name]):
            content = saved[group.optimizer_name]["groups"].get(group.name)
            order = [names[p] for p in group.options["params"]]
            if content and list(content["parameters"]) != order:
                yield f"the parameters of {group.optimizer_name!r} are in another order"


def _other_parameters(
    here: Mapping[str, _Place],
    there: Mapping[str, _Place],
    fixed_here: Mapping[str, tuple[int, ...]],
    fixed_there: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    shapes_here = {**fixed_here, **{name: place.shape for name, place in here.items()}}
    shapes_there = {**fixed_there, **{name: place.shape for name, place in there.items()}}
    for name in {**here, **there}:
        if name not in shapes_there:
            yield f"parameter {name} (group {here[name].group}) is not in the checkpoint"
        elif name not in shapes_here:
            group = there[name].group
            yield f"parameter {name} (group {group}) of the checkpoint is not in this run"
        elif shapes_here[name] != shapes_there[name]:
            shape, was = list(shapes_here[name]), list(shapes_there[name])
            yield f"parameter {name} has shape {shape}, it had {was}"
        elif name in here and name in there and here[name][:2] != there[name][:2]:
            yield (
                f"parameter {name} is in group {here[name].group!r} of {here[name].optimizer!r},"
                f" it was in {there[name].group!r} of {there[name].optimizer!r}"
            )


def _state(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    saved: Mapping[str, Any],
    there: Mapping[str, _Place],
) -> dict[Tensor, dict[str, Any]]:
    states = {}
    for group in optimizer.param_groups:
        on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[parameter]
            if name in there:  # else it was frozen, and begins without state
                states[parameter] = {
                    key: _like(value, parameter, on_host and key in _ON_HOST, there[name].dtype)
                    for key, value in saved.get(name, {}).items()
                }
    return states


def _like(value: Any, parameter: Tensor, on_host: bool, dtype: str) -> Any:
    # A copy on the parameter's device, bit for bit. torch's own `load_state_dict` casts to the
    # parameter's dtype, which loses bits. Here a value is cast only if the parameter itself had
    # another `dtype` when it was saved.
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
