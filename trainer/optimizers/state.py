"""A torch optimizer's step, its closure, and its state by parameter name.

By name, so that state is never loaded into another parameter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor
from torch.optim import SGD, Optimizer

from regimen.conf.errors import lacks_memory, truncated_list
from regimen.data.batch import map_tensors
from regimen.trainer.checkpoints.archive import NotPlainError, plain, plain_part
from regimen.trainer.errors import CheckpointError, device_failed

if TYPE_CHECKING:
    from regimen.trainer.optimizers.optimizers import Optimizers

State = Mapping[str, Any]  # of an optimizer or a schedule, as a checkpoint holds it
# The wrapper that torch puts around `step` of every class of optimizers, and the one of its own.
_LABELLED = Optimizer.profile_hook_step(lambda: None).__code__
_SWITCHED = optimizer_module._use_grad_for_differentiable(lambda self: None).__code__
# Kernels over lists of tensors: one launch where a loop in Python has one for each tensor.
foreach_norm, foreach_div_ = torch._foreach_norm, torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
# Counters that torch keeps on the host unless the optimizer runs captured or fused.
_ON_HOST = ("step", "mu_product")
# Options that select an implementation, which depends on the machine, and not the update.
_IMPLEMENTATION = ("foreach", "fused", "capturable")


class _Place(NamedTuple):
    # Where a parameter is, in this run or as it was saved.
    group: str  # with its optimizer; empty if it is frozen
    shape: list[int]
    dtype: str


_NOWHERE = _Place("", [], "")
# Entries of torch's groups that are no hyper-parameters.
_OF_PARAMETERS = ("params", "param_names", "name")
_NOTHING: State = {"groups": {}, "state": {}, "shared": {}}


def take_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without what torch puts around it where nothing needs that.

    The label for profilers takes 30 us. It is needed by a profiler and by hooks; a `step` that is
    not torch's own wrapper (compiled, decorated) is called as it is. Gradients are switched off
    here: where torch does it, it imports its compiler, which takes seconds.
    """
    labelled: Any = type(optimizer).step
    # A scheduler of torch replaces `step` of an object to note that it was called.
    noted = vars(optimizer).get("step")
    hooks = list(optimizer._optimizer_step_pre_hooks.values())
    if (
        getattr(labelled, "__code__", None) is not _LABELLED
        or not (noted is None or hasattr(noted, "_wrapped_by_lr_sched"))
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or hooks not in ([], [begin_with_zeros])
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        optimizer.step()
        return
    for hook in hooks:
        hook(optimizer, (), {})
    optimizer._opt_called = True  # type: ignore[attr-defined]
    step = labelled.__wrapped__
    if step.__code__ is not _SWITCHED or optimizer.defaults["differentiable"]:
        step(optimizer)
        return
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        step.__wrapped__(optimizer)
    finally:
        torch._C._set_grad_enabled(enabled)


def needs_closure(kind: type[Any]) -> bool:
    """Return whether the `step` of a class requires a closure for the loss, as LBFGS's does."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    return closure is not None and closure.default is inspect.Parameter.empty


def can_leave_out(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel can skip a step without a trace; tries it.

    Fused kernels promise to. The exception is SGD with dampening, whose first step differs from the
    others and must not be skipped.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if isinstance(optimizer, SGD) and any(map(damped, optimizer.param_groups)):
        return False
    kinds = {(p.device, p.dtype) for g in optimizer.param_groups for p in g["params"]}
    return all(_leaves_out(optimizer, *kind) for kind in kinds)


def _leaves_out(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> bool:
    # Not every device has the kernel, and there were some that passed over `found_inf`. So one
    # element takes a step that must be left out, and one that must not. Waits for the device.
    given = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in given}
    one = torch.nn.Parameter(torch.ones(1, 1, device=device, dtype=dtype))
    try:
        trial = type(optimizer)([one], **options | {"lr": 0.5})
        for gradient, found in ((math.nan, 1.0), (1.0, 0.0)):
            one.grad = torch.full_like(one, gradient)
            if isinstance(trial, SGD) and trial.defaults["fused"]:
                begin_with_zeros(trial)
            trial.grad_scale = None  # type: ignore[attr-defined]
            trial.found_inf = torch.full((), found, device=device)  # type: ignore[attr-defined]
            take_step(trial)
            if found and one.item() != 1:
                return False
        return math.isfinite(one.item()) and one.item() != 1
    except (RuntimeError, TypeError, ValueError) as error:
        if lacks_memory(error) or device_failed(error):
            raise
        return False


def damped(group: Mapping[str, Any]) -> bool:
    """Return whether a group of SGD applies dampening: to every gradient except the first."""
    return bool(group.get("momentum")) and bool(group.get("dampening"))


def begin_with_zeros(optimizer: Optimizer, *_: Any) -> None:
    """Step pre-hook: create momentum buffers of zeros for fused SGD.

    torch creates all buffers at the first step, as copies of the gradients. It then raises
    TypeError for a parameter whose first gradient comes later, and a first step that the kernel
    skips leaves uninitialized memory in the buffers. Starting from zeros gives the same result, bit
    for bit.
    """
    begin = [g for g in optimizer.param_groups if g["fused"] and g["momentum"] and not damped(g)]
    for parameter in (p for group in begin for p in group["params"] if p.grad is not None):
        state = optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)


def type_name(instance: object) -> str:
    """Return the import path of an object's class."""
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def pack(of: Optimizers) -> dict[str, Any]:
    """Return types, groups, hyper-parameters and state by name; the tensors are not copied."""
    packed = {}
    for name, optimizer in of.items():
        kind = type_name(optimizer)
        section: dict[str, Any] = {"type": kind, "groups": {}, "state": {}, "shared": {}}
        packed[name] = section
        try:
            for key, values in optimizer.state.items():
                if isinstance(key, Tensor):
                    section["state"][of.names[key]] = plain(dict(values))
                else:  # state that belongs to no parameter
                    section["shared"][str(key)] = plain(values)
        except NotPlainError as error:
            raise CheckpointError(
                f"optimizer {name!r} ({kind}) keeps a {error} in its state; only tensors and plain "
                "containers can be saved"
            ) from None
    for group, owner, options in of.groups():
        own = {k: v for k, v in options.items() if k not in _OF_PARAMETERS}
        packed[owner]["groups"][group] = {
            "hyper_parameters": plain_part(own),
            "parameters": {of.names[p]: _described(p) for p in options["params"]},
        }
    frozen = {name: _described(tensor) for name, tensor in of.frozen.items()}
    return {"optimizers": packed, "frozen": frozen}


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def unpack(of: Optimizers, saved: State, hyper_parameters: bool = True) -> list[str]:
    """Load what `pack` returned by parameter name, bit for bit; on an error nothing is changed.

    `hyper_parameters=False` keeps the hyper-parameters of the config, such as learning rates.
    Returns remarks, for the log, on parameters that were frozen or unfrozen since. Raises
    `CheckpointError` for another type of optimizer, unknown or missing names, other shapes, other
    groups.
    """
    loaded = []
    try:
        here, there = _places(pack(of)), _places(saved)
        if problems := [*_misfits(here, there)]:
            raise CheckpointError(
                f"the optimizer state does not fit: {truncated_list(problems, 1)}"
            )
        for group, owner, options in of.groups():
            # A group that was frozen as a whole when it was saved keeps the values of this run.
            section = saved["optimizers"].get(owner, _NOTHING)
            known = section["groups"].get(group, {"hyper_parameters": {}, "parameters": {}})
            members = {of.names[p]: p for p in options["params"]}
            # Its state is one vector over all parameters.
            moved = [*known["parameters"]] not in ([], [*members])
            if moved and needs_closure(type(of.optimizers[owner])):
                raise CheckpointError(f"the parameters of {owner!r} are in another order")
            on_host = not (options.get("capturable") or options.get("fused"))
            states = {}
            for name, parameter in members.items():
                casts = here[name].dtype != there[name].dtype
                states[parameter] = {
                    key: _like(value, parameter, on_host and key in _ON_HOST, casts)
                    for key, value in section["state"].get(name, {}).items()
                }
            values, shared = dict(known["hyper_parameters"]), dict(section["shared"])
            loaded.append((of.optimizers[owner].state, options, states, values, shared))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state is malformed: {error!r}") from None
    for state, options, states, values, shared in loaded:
        for parameter, own in states.items():
            state.pop(parameter, None)
            if own:
                state[parameter] = own
        state.update(shared)
        if hyper_parameters:
            options.update({k: v for k, v in values.items() if k not in _IMPLEMENTATION})
    remarks = []
    for remark, one, other in (
        ("unfrozen since the checkpoint, they begin without state", here, there),
        ("frozen since the checkpoint, their state is dropped", there, here),
    ):
        if names := [n for n, place in one.items() if place.group and not other[n].group]:
            remarks.append(f"{remark}: {', '.join(names)}")
    return remarks


def _places(packed: State) -> dict[str, _Place]:
    groups = {"": packed["frozen"]}
    for name, section in packed["optimizers"].items():
        for group, content in section["groups"].items():
            groups[f"group {group!r} of {name!r} ({section['type']})"] = content["parameters"]
    return {
        name: _Place(group, [*described["shape"]], described["dtype"])
        for group, parameters in groups.items()
        for name, described in parameters.items()
    }


def _misfits(here: Mapping[str, _Place], there: Mapping[str, _Place]) -> Iterator[str]:
    for name in {**here, **there}:
        now, was = here.get(name, _NOWHERE), there.get(name, _NOWHERE)
        if not (now.group or was.group):
            continue
        if was is _NOWHERE:
            yield f"parameter {name} ({now.group}) is not in the checkpoint"
        elif now is _NOWHERE:
            yield f"parameter {name} ({was.group}) of the checkpoint is not in this run"
        elif now.shape != was.shape:
            yield f"parameter {name} has shape {now.shape}, it had {was.shape}"
        elif now.group and was.group and now.group != was.group:
            yield f"parameter {name} is in {now.group}, it was in {was.group}"


def _like(value: Any, parameter: Tensor, on_host: bool, casts: bool) -> Any:
    # A copy on the parameter's device, bit for bit. torch's own `load_state_dict` casts to the
    # parameter's dtype, which loses bits. Here a value is cast only if the parameter itself had
    # another dtype when it was saved.
    device = torch.device("cpu") if on_host else parameter.device

    def copied(tensor: Tensor) -> Tensor:
        cast = casts and tensor.dim() > 0 and tensor.is_floating_point()
        return tensor.detach().to(device, parameter.dtype if cast else tensor.dtype, copy=True)

    return map_tensors(copied, value)
