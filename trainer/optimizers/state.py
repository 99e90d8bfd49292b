"""A torch optimizer's step, its closure, and its state by parameter name.

By name, so that state is never loaded into another parameter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from regimen.conf.errors import lacks_memory, truncated_list
from regimen.data.batch import map_tensors
from regimen.trainer.checkpoints.archive import NotPlainError, plain, plain_part
from regimen.trainer.errors import CheckpointError, device_failed, qualified_name
from regimen.trainer.fast import step_optimizer

State = Mapping[str, Any]  # of an optimizer or a schedule, as a checkpoint holds it
# Counters that torch keeps on the host unless the optimizer runs captured or fused.
_ON_HOST = ("step", "mu_product")
# Options that select an implementation, which depends on the machine, and not the update.
_IMPLEMENTATION = ("foreach", "fused", "capturable")


class TorchGroup(NamedTuple):
    """A parameter group: its unique name, that of its optimizer, and torch's dict of the group."""

    name: str
    optimizer_name: str
    options: dict[str, Any]


class _ParamSpec(NamedTuple):
    """Group, shape and dtype of a parameter: compared between this run and a checkpoint."""

    group: str  # the description of its group and optimizer; empty if it is frozen
    shape: list[int]
    dtype: str


# Entries of torch's groups that are no hyper-parameters.
_NOT_HYPER_PARAMETERS = ("params", "param_names", "name")
_NO_SECTION: State = {"groups": {}, "state": {}, "shared": {}}
_NO_GROUP: State = {"hyper_parameters": {}, "parameters": {}}


def needs_closure(optimizer_class: type[Any]) -> bool:
    """Return whether the `step` of a class requires a closure for the loss, as LBFGS's does."""
    step = getattr(optimizer_class, "step", None)
    if not callable(step):
        return False
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def supports_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel can skip a step without a trace; tries it.

    Fused kernels promise to. The exception is SGD with dampening, whose first step differs from the
    others and must not be skipped. Waits for the device.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if isinstance(optimizer, SGD) and any(map(uses_dampening, optimizer.param_groups)):
        return False
    variants = {(p.device, p.dtype) for g in optimizer.param_groups for p in g["params"]}
    return all(_respects_found_inf(optimizer, device, dtype) for device, dtype in variants)


def _respects_found_inf(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> bool:
    """Try a step that must be skipped and one that must not, on a parameter of one element.

    Not every device has the kernel, and some kernels have ignored `found_inf`. Waits for the
    device.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    parameter = torch.nn.Parameter(torch.ones(1, 1, device=device, dtype=dtype))
    try:
        trial = type(optimizer)([parameter], **options | {"lr": 0.5})
        _step_with_found_inf(trial, parameter, math.nan, found_inf=1.0)
        # The result is needed now: it decides how the optimizer is built.
        if parameter.item() != 1:
            return False
        _step_with_found_inf(trial, parameter, 1.0, found_inf=0.0)
        value = parameter.item()
        return math.isfinite(value) and value != 1
    except (RuntimeError, TypeError, ValueError) as error:
        if lacks_memory(error) or device_failed(error):
            raise
        return False


def _step_with_found_inf(
    trial: Optimizer, parameter: Tensor, gradient: float, found_inf: float
) -> None:
    parameter.grad = torch.full_like(parameter, gradient)
    if isinstance(trial, SGD) and trial.defaults["fused"]:
        init_momentum_buffers(trial)
    # torch's GradScaler hands both to fused kernels as attributes of the optimizer.
    trial.grad_scale = None  # type: ignore[attr-defined]
    trial.found_inf = torch.full((), found_inf, device=parameter.device)  # type: ignore[attr-defined]
    step_optimizer(trial)


def uses_dampening(group: Mapping[str, Any]) -> bool:
    """Return whether a group of SGD applies dampening: to every gradient except the first."""
    return bool(group.get("momentum")) and bool(group.get("dampening"))


def init_momentum_buffers(optimizer: Optimizer, *_: Any) -> None:
    """Step pre-hook: create momentum buffers of zeros for fused SGD.

    torch creates all buffers at the first step, as copies of the gradients. It then raises
    TypeError for a parameter whose first gradient comes later, and a first step that the kernel
    skips leaves uninitialized memory in the buffers. Starting from zeros gives the same result, bit
    for bit.
    """
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]) or uses_dampening(group):
            continue
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)


def pack(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    frozen: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return types, groups, hyper-parameters and state by name; the tensors are not copied.

    `names`: of all parameters; `frozen`: those that no optimizer has. Raises `CheckpointError` for
    a state that only code could restore.
    """
    packed = {}
    for optimizer_name, optimizer in optimizers.items():
        kind = qualified_name(optimizer)
        section: dict[str, Any] = {"type": kind, "groups": {}, "state": {}, "shared": {}}
        packed[optimizer_name] = section
        try:
            for key, values in optimizer.state.items():
                if isinstance(key, Tensor):
                    section["state"][names[key]] = plain(dict(values))
                else:  # state that belongs to no parameter
                    section["shared"][str(key)] = plain(values)
        except NotPlainError as error:
            raise CheckpointError(
                f"optimizer {optimizer_name!r} ({kind}) keeps a {error} in its state; only tensors "
                "and plain containers can be saved"
            ) from None
    for group_name, optimizer_name, options in groups:
        values = {k: v for k, v in options.items() if k not in _NOT_HYPER_PARAMETERS}
        packed[optimizer_name]["groups"][group_name] = {
            "hyper_parameters": plain_part(values),
            "parameters": {names[p]: _shape_and_dtype(p) for p in options["params"]},
        }
    return {
        "optimizers": packed,
        "frozen": {name: _shape_and_dtype(tensor) for name, tensor in frozen.items()},
    }


def _shape_and_dtype(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def unpack(
    optimizers: Mapping[str, Optimizer],
    groups: Sequence[TorchGroup],
    names: Mapping[Tensor, str],
    frozen: Mapping[str, Tensor],
    saved: State,
    hyper_parameters: bool = True,
) -> list[str]:
    """Load what `pack` returned by parameter name, bit for bit; on an error nothing is changed.

    `hyper_parameters=False` keeps the hyper-parameters of the config, such as learning rates.
    Returns remarks, for the log, on parameters that were frozen or unfrozen since. Raises
    `CheckpointError` for another type of optimizer, unknown or missing names, other shapes, other
    groups.
    """
    # First everything is converted, then everything is assigned: an error changes nothing.
    loaded = []
    try:
        current_specs = _specs(pack(optimizers, groups, names, frozen))
        saved_specs = _specs(saved)
        problems = list(_differences(current_specs, saved_specs))
        if problems:
            raise CheckpointError(
                f"the optimizer state does not fit: {truncated_list(problems, 1)}"
            )
        for group_name, optimizer_name, options in groups:
            optimizer = optimizers[optimizer_name]
            # A group that was frozen as a whole when it was saved keeps the values of this run.
            section = saved["optimizers"].get(optimizer_name, _NO_SECTION)
            saved_group = section["groups"].get(group_name, _NO_GROUP)
            parameters = {names[p]: p for p in options["params"]}
            # LBFGS keeps its state as one vector over all parameters, in their order.
            reordered = [*saved_group["parameters"]] not in ([], [*parameters])
            if reordered and needs_closure(type(optimizer)):
                raise CheckpointError(f"the parameters of {optimizer_name!r} are in another order")

            on_host = not (options.get("capturable") or options.get("fused"))
            states = {}
            for name, parameter in parameters.items():
                casts = current_specs[name].dtype != saved_specs[name].dtype
                states[parameter] = {
                    key: _copy_for(value, parameter, on_host and key in _ON_HOST, casts)
                    for key, value in section["state"].get(name, {}).items()
                }
            # Some are tensors that the optimizer changes in place: the steps of timm's LAMB.
            values = map_tensors(torch.clone, dict(saved_group["hyper_parameters"]))
            shared = dict(section["shared"])
            loaded.append((optimizer.state, states, shared, options, values))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state is malformed: {error!r}") from None

    for state, states, shared, options, values in loaded:
        for parameter, parameter_state in states.items():
            state.pop(parameter, None)
            if parameter_state:
                state[parameter] = parameter_state
        state.update(shared)
        if hyper_parameters:
            options.update({k: v for k, v in values.items() if k not in _IMPLEMENTATION})

    remarks = []
    unfrozen = _trained_only_in(current_specs, saved_specs)
    if unfrozen:
        remarks.append(
            f"unfrozen since the checkpoint, they begin without state: {', '.join(unfrozen)}"
        )
    newly_frozen = _trained_only_in(saved_specs, current_specs)
    if newly_frozen:
        remarks.append(
            f"frozen since the checkpoint, their state is dropped: {', '.join(newly_frozen)}"
        )
    return remarks


def _specs(packed: State) -> dict[str, _ParamSpec]:
    """Return the specification of each parameter by name."""
    groups = {"": packed["frozen"]}
    for name, section in packed["optimizers"].items():
        for group, content in section["groups"].items():
            groups[f"group {group!r} of {name!r} ({section['type']})"] = content["parameters"]
    return {
        name: _ParamSpec(group, [*described["shape"]], described["dtype"])
        for group, parameters in groups.items()
        for name, described in parameters.items()
    }


def _differences(
    current_specs: Mapping[str, _ParamSpec], saved_specs: Mapping[str, _ParamSpec]
) -> Iterator[str]:
    for name in {**current_specs, **saved_specs}:
        current = current_specs.get(name)
        saved = saved_specs.get(name)
        if saved is None:
            if current is not None and current.group:
                yield f"parameter {name} ({current.group}) is not in the checkpoint"
        elif current is None:
            if saved.group:
                yield f"parameter {name} ({saved.group}) of the checkpoint is not in this run"
        elif not (current.group or saved.group):
            continue  # frozen in both
        elif current.shape != saved.shape:
            yield f"parameter {name} has shape {current.shape}, it had {saved.shape}"
        elif current.group and saved.group and current.group != saved.group:
            yield f"parameter {name} is in {current.group}, it was in {saved.group}"


def _trained_only_in(
    specs: Mapping[str, _ParamSpec], others: Mapping[str, _ParamSpec]
) -> list[str]:
    """Return the names of parameters that have a group in `specs` and are frozen in `others`."""
    return [name for name, spec in specs.items() if spec.group and not others[name].group]


def _copy_for(value: Any, parameter: Tensor, on_host: bool, casts: bool) -> Any:
    """Copy a value of the state to the parameter's device, bit for bit.

    torch's own `load_state_dict` casts to the parameter's dtype, which loses bits. Here a value is
    cast only if the parameter itself had another dtype when it was saved (`casts`).
    """
    device = torch.device("cpu") if on_host else parameter.device

    def copied(tensor: Tensor) -> Tensor:
        cast = casts and tensor.dim() > 0 and tensor.is_floating_point()
        return tensor.detach().to(device, parameter.dtype if cast else tensor.dtype, copy=True)

    return map_tensors(copied, value)
