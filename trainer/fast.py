"""Shorter ways through torch for small networks, each with the plain code that it stands for.

An update of a small network is bound by Python: of one with four tensors, on the machine of
`benchmarks/step.json`, these functions save about 120 of 290 us; of a ResNet-18's 0.2%. Everything
private to torch that an update needs is in this file.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

# Kernels over lists of tensors: one launch where a loop in Python has one for each tensor.
foreach_norm = torch._foreach_norm
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
# The code of the wrapper that torch puts around `step` of every class of optimizers, and of the
# one that switches gradients off.
_PROFILER_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
_NO_GRAD_WRAPPER = optimizer_module._use_grad_for_differentiable(lambda self: None).__code__
_OURS = "regimen."  # how the names of our modules begin


def run_backward(loss: Tensor, gradient: Tensor) -> None:
    """Do `loss.backward(gradient)`, without the checks of its arguments: 23 us an update."""
    if type(loss) is not Tensor:
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    Variable._execution_engine.run_backward(
        (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def is_uniform(tensors: Iterable[Tensor]) -> bool:
    """Return whether there are tensors, all of them plain and of one device and dtype."""
    kinds = {(type(tensor), tensor.device, tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and kinds.pop()[0] in (Tensor, nn.Parameter)


def uniform_norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Do `torch.nn.utils.get_total_norm(tensors, norm_type)` for tensors that are uniform.

    torch groups them by device and dtype first: 20 us an update.
    """
    norms = torch.stack(foreach_norm(tensors, norm_type))
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm


def step_optimizer(optimizer: Optimizer) -> None:
    """Do `optimizer.step()`, without what torch puts around it where nothing needs that.

    The label for profilers takes 38 us an update. A profiler and hooks need it; a `step` that is
    not torch's own wrapper (compiled, decorated) is called as it is. Gradients are switched off
    here: where torch does it, it imports its compiler, which takes seconds.
    """
    hooks = list(optimizer._optimizer_step_pre_hooks.values())
    if _needs_wrapper(optimizer, hooks):
        optimizer.step()
        return
    for hook in hooks:
        hook(optimizer, (), {})
    optimizer._opt_called = True  # type: ignore[attr-defined]
    step: Any = type(optimizer).step
    step = step.__wrapped__
    if step.__code__ is not _NO_GRAD_WRAPPER or optimizer.defaults["differentiable"]:
        step(optimizer)
        return
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        step.__wrapped__(optimizer)
    finally:
        torch._C._set_grad_enabled(was_enabled)


def _needs_wrapper(optimizer: Optimizer, hooks: Sequence[Callable[..., Any]]) -> bool:
    step = type(optimizer).step
    if getattr(step, "__code__", None) is not _PROFILER_WRAPPER:
        return True
    # A scheduler of torch replaces `step` of an object to note that it was called.
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return True
    # Those of ours, which start momentum with zeros, take no arguments and return nothing.
    for hook in hooks:
        if not str(hook.__module__).startswith(_OURS):
            return True
    return bool(
        torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    )


def load_batches(loader: Any, order: Iterable[Any]) -> Iterator[tuple[Sequence[int], Any]]:
    """Do `for batch in loader`, of a DataLoader without workers, in another order.

    Yields the samples' indices, () where the items of the order are single samples, and the batch.
    Without the label for profilers that torch puts around each batch: 36 us an update.
    """
    dataset = loader.dataset
    collate = loader.collate_fn
    if loader.batch_sampler is None:
        for index in order:
            yield (), collate(dataset[index])
        return
    fetch_samples = getattr(dataset, "__getitems__", None)
    if not fetch_samples:
        fetch_samples = _one_by_one(dataset)
    for indices in order:
        yield indices, collate(fetch_samples(indices))


def _one_by_one(dataset: Any) -> Callable[[Sequence[int]], list[Any]]:
    return lambda indices: [dataset[index] for index in indices]
