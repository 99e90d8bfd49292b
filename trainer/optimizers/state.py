"""A torch optimizer's step, its closure, and its state by parameter name.

By name, so that state is never loaded into another parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor
from torch.optim import SGD, Optimizer

from trainer.checkpoints.archive import NotPlainError, plain, plain_part
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from trainer.optimizers.optimizers import Optimizers

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


def take_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, without what torch puts around it where nothing needs that.

    The label for profilers takes 30 us. It is needed by a profiler and by hooks; a `step` that is
    not torch's own wrapper (compiled, decorated) is called as it is. Gradients are switched off
    here: where torch does it, it imports its compiler, which takes seconds.
    """
    step = _unlabelled(optimizer)
    if step is None:
        optimizer.step()
    elif step.__code__ is not _SWITCHED or optimizer.defaults["differentiable"]:
        step(optimizer)
    else:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            step.__wrapped__(optimizer)
        finally:
            torch._C._set_grad_enabled(enabled)


def _unlabelled(optimizer: Optimizer) -> Any:
    """Return the function below torch's label, or None if `step` has to be called as it is."""
    labelled = type(optimizer).step
    # A scheduler of torch replaces `step` of an object to note that it was called.
    noted = vars(optimizer).get("step")
    if (
        getattr(labelled, "__code__", None) is not _LABELLED
        or not (noted is None or hasattr(noted, "_wrapped_by_lr_sched"))
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    ):
        return None
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return labelled.__wrapped__  # type: ignore[attr-defined]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` requires a closure that computes the loss, as LBFGS does."""
    return takes_closure(type(optimizer))


def takes_closure(kind: type[Any]) -> bool:
    """Return whether the `step` of a class requires a closure."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    return closure is not None and closure.default is inspect.Parameter.empty


def can_leave_out(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel can skip a step without a trace.

    Fused kernels can. The exception is SGD with dampening, whose first step differs from the
    others and must not be skipped.
    """
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return fused and not (isinstance(optimizer, SGD) and any(map(damped, optimizer.param_groups)))


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


class _Place(NamedTuple):
    # Where a parameter is, in this run or as it was saved; no optimizer has a frozen one.
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


def pack(of: Optimizers) -> dict[str, Any]:
    """Return types, groups, hyper-parameters and state; the tensors are shared, not copied."""
    packed = {name: _packed(name, optimizer, of.names) for name, optimizer in of.items()}
    for group in of.groups():
        packed[group.optimizer_name]["groups"][group.name] = {
            "hyper_parameters": plain_part(hyper_parameters(group.options)),
            "parameters": {of.names[p]: _described(p) for p in group.options["params"]},
        }
    described = {name: _described(tensor) for name, tensor in of.frozen.items()}
    return {"optimizers": packed, "frozen": described}


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _packed(name: str, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    kind = type_name(optimizer)
    packed: dict[str, Any] = {"type": kind, "groups": {}, "state": {}, "shared": {}}
    try:
        for owner, values in optimizer.state.items():
            if isinstance(owner, Tensor):
                packed["state"][names[owner]] = plain(dict(values))
            else:  # state that belongs to no parameter
                packed["shared"][str(owner)] = plain(values)
    except NotPlainError as error:
        raise CheckpointError(
            f"optimizer {name!r} ({kind}) keeps a {error} in its state; only tensors and plain "
            "containers can be saved"
        ) from None
    return packed


def unpack(of: Optimizers, saved: Mapping[str, Any], restore_hyper_parameters: bool) -> list[str]:
    """Load what `pack` returned; raise and change nothing if anything does not match.

    Returns remarks on parameters that were frozen or unfrozen since the state was saved.
    """
    groups = of.groups()
    try:
        here, there = _places(pack(of)), _places(saved)
        problems = [*_other_optimizers(of, saved["optimizers"]), *_other_parameters(here, there)]
        if problems:
            more = f" (+{len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckpointError(f"the optimizer state does not fit: {problems[0]}{more}")
        sections = [saved["optimizers"][name] for name in of.optimizers]
        states = [
            _state(optimizer, of.names, section["state"], there)
            for optimizer, section in zip(of.optimizers.values(), sections, strict=True)
        ]
        shared = [dict(section["shared"]) for section in sections]
        known = [saved["optimizers"][group.optimizer_name]["groups"] for group in groups]
        # A group that was frozen as a whole when it was saved keeps the values of this run.
        options = [
            dict(known_there[group.name]["hyper_parameters"]) if group.name in known_there else {}
            for group, known_there in zip(groups, known, strict=True)
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the optimizer state is malformed: {error!r}") from None
    for optimizer, found, others in zip(of.optimizers.values(), states, shared, strict=True):
        for parameter, values in found.items():
            optimizer.state.pop(parameter, None)
            if values:
                optimizer.state[parameter] = values
        optimizer.state.update(others)
    if restore_hyper_parameters:
        for group, values in zip(groups, options, strict=True):
            group.options.update({k: v for k, v in values.items() if k not in _IMPLEMENTATION})
    remarks = {
        "unfrozen since the checkpoint, they begin without state": (here, there),
        "frozen since the checkpoint, their state is dropped": (there, here),
    }
    changed = {
        remark: [name for name, place in a.items() if place.optimizer and not b[name].optimizer]
        for remark, (a, b) in remarks.items()
    }
    return [f"{remark}: {', '.join(names)}" for remark, names in changed.items() if names]


def _places(packed: Mapping[str, Any]) -> dict[str, _Place]:
    def place(optimizer: str, group: str, described: Mapping[str, Any]) -> _Place:
        return _Place(optimizer, group, tuple(described["shape"]), str(described["dtype"]))

    frozen = {name: place("", "", described) for name, described in packed["frozen"].items()}
    return frozen | {
        name: place(optimizer, group, described)
        for optimizer, section in packed["optimizers"].items()
        for group, content in section["groups"].items()
        for name, described in content["parameters"].items()
    }


def _other_optimizers(of: Optimizers, saved: Mapping[str, Any]) -> Iterator[str]:
    for name in saved.keys() - of.optimizers.keys():
        yield f"the checkpoint has an optimizer {name!r}, this run has {', '.join(of.optimizers)}"
    for name, optimizer in of.items():
        if name not in saved:
            yield f"optimizer {name!r} is not in the checkpoint, which has {', '.join(saved)}"
        elif saved[name]["type"] != type_name(optimizer):
            yield f"optimizer {name!r} is {type_name(optimizer)}, it was {saved[name]['type']}"
    for group in of.groups():  # LBFGS: its state is one vector over all parameters
        name = group.optimizer_name
        if name in saved and needs_closure(of.optimizers[name]):
            content = saved[name]["groups"].get(group.name)
            if content and [*content["parameters"]] != [
                of.names[p] for p in group.options["params"]
            ]:
                yield f"the parameters of {name!r} are in another order"


def _other_parameters(here: Mapping[str, _Place], there: Mapping[str, _Place]) -> Iterator[str]:
    trained = [name for places in (here, there) for name, at in places.items() if at.optimizer]
    for name in dict.fromkeys(trained):
        now, was = here.get(name), there.get(name)
        if was is None:
            yield f"parameter {name} (group {here[name].group}) is not in the checkpoint"
        elif now is None:
            yield f"parameter {name} (group {was.group}) of the checkpoint is not in this run"
        elif now.shape != was.shape:
            yield f"parameter {name} has shape {list(now.shape)}, it had {list(was.shape)}"
        elif now.optimizer and was.optimizer and now[:2] != was[:2]:
            yield (
                f"parameter {name} is in group {now.group!r} of {now.optimizer!r}, it was in "
                f"{was.group!r} of {was.optimizer!r}"
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
            place = there[names[parameter]]
            if place.optimizer:  # else it was frozen, and begins without state
                states[parameter] = {
                    key: _like(value, parameter, on_host and key in _ON_HOST, place.dtype)
                    for key, value in saved.get(names[parameter], {}).items()
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
