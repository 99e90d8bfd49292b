"""The loss of a micro-batch, scaled so that gradients add up to those of the whole update (I3)."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regimen.data.batch import BatchSlice, MicroBatch
from regimen.trainer.device import accumulate_dtype
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import SUM, StepOutput, Task

MicroBatches = Sequence[MicroBatch]  # of one update
Count = Tensor | float


def update_counts(
    task: Task, strategy: Strategy, micro_batches: MicroBatches
) -> dict[str, Count | None]:
    """Return the counts of the whole update for the task's `count_names`; a collective.

    None: an only micro-batch on a single process, whose own counts, which its step returns, are
    those of the update. Nothing has to be computed or read then.
    """
    if not task.count_names:
        return {}
    is_alone = strategy.group.world_size == 1
    if is_alone and len(micro_batches) == 1:
        return dict.fromkeys(task.count_names)
    local_counts = [task.counts(m.batch) for m in micro_batches if m.batch_slice.count]
    totals: dict[str, Count | None] = {}
    for name in task.count_names:
        total = sum(counts[name] for counts in local_counts)
        # If no label of the whole update counts, all weights are 0, and any denominator will do.
        if is_alone and not isinstance(total, Tensor):
            totals[name] = total or 1.0
        else:
            # A collective: every process needs the sum, before the first backward pass.
            whole = strategy.group.reduce(_on_device(total, strategy.device))
            totals[name] = torch.where(whole > 0, whole, 1.0)
    return totals


def scaled_loss(
    output: StepOutput,
    batch_slice: BatchSlice,
    totals: Mapping[str, Count | None],
    gradient_scale: float,
) -> Tensor:
    """Return the scalar to call `backward` on for one micro-batch.

    Gradients add up over micro-batches and processes. So that their sum is the gradient of the
    mean over the whole update, each term of the loss is

        its mean over the micro-batch * local count / count of the whole update * gradient_scale

    `batch_slice`: how many samples the micro-batch and the update have. `totals`: the counts of
    terms that are not means over samples, from `update_counts`. `gradient_scale`: what the strategy
    divides gradients by when it exchanges them (under DDP the number of processes).
    """
    terms = []
    for name, term in output.terms.items():
        local_count = output.counts.get(name)
        if not batch_slice.count:
            # A borrowed sample: this process has none of its own left, but has to take part in the
            # exchange of gradients. Its own gradients are zero.
            terms.append(term.sum() * 0)
        elif local_count is SUM:
            terms.append(term.sum() * gradient_scale)
        elif local_count is None:
            terms.append(
                _weighted(_mean(term), batch_slice.count, batch_slice.total, gradient_scale)
            )
        else:
            terms.append(_weighted(_mean(term), local_count, totals[name], gradient_scale))
    return add_up(terms)


def _mean(term: Tensor) -> Tensor:
    return term.mean() if term.ndim else term


def _weighted(mean: Tensor, local: Count, total: Count | None, gradient_scale: float) -> Tensor:
    """Return `mean * local / total * gradient_scale`; 0 if `local` is 0."""
    if total is None:
        return _whole(mean, local, gradient_scale)
    if isinstance(local, Tensor) or isinstance(total, Tensor) or not local:
        # A count that is on the device stays there: to read it the host would have to wait. A mean
        # over no label is NaN, also in its gradient; `where` cuts both off.
        local = _on_device(local, mean.device)
        mean = torch.where(local > 0, mean, 0.0)
        weight = local * gradient_scale / total  # in float64, where the device has it
        return mean * weight.to(mean.dtype)
    host_weight = local * gradient_scale / total
    if host_weight == 1:
        return mean  # one micro-batch on one device
    return mean * host_weight


def _whole(mean: Tensor, count: Count, gradient_scale: float) -> Tensor:
    """Return `mean * gradient_scale`; 0 if `count` is 0.

    `count / total` is exactly 1 here. Computing it launches kernels, and small networks on a GPU
    are bound by launches.
    """
    device = mean.device
    is_empty = None  # whether no label counts: their mean is NaN
    if isinstance(count, Tensor):
        is_empty = count.to(device) <= 0  # stays on the device; false for a count that is NaN
    elif count <= 0:
        is_empty = torch.ones((), dtype=torch.bool, device=device)
    if is_empty is not None:
        mean = torch.where(is_empty, _zero(device, mean.dtype), mean)
    if gradient_scale != 1:
        mean = mean * gradient_scale
    return mean


@functools.cache
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    # A number in Python would be copied to the device by a kernel each time.
    return torch.zeros((), dtype=dtype, device=device)


def _on_device(count: Count, device: torch.device) -> Tensor:
    dtype = accumulate_dtype(device)
    if isinstance(count, Tensor):
        return count.to(device, dtype)
    return torch.full((), count, dtype=dtype, device=device)  # a copy from the host would wait


def add_up(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses."""
    return functools.reduce(torch.add, terms)
