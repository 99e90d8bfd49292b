"""The cause of an error in the computation of a batch (model, data or loss), in one line."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from trainer.errors import ModelError, RunError, SampleError
from trainer.user_code import change_for, failed_layer, spelled

# What torch's and our modules raise for tensors that do not fit each other.
MISFITS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
# Packages whose errors are not attributed to the user's code.
_LIBRARIES = ("torch", "torchvision", "timm", "torchmetrics", "models", "trainer", "data", "hydra")
# Packages whose errors come from another process, or hide where they come from.
_FOREIGN = ("torch.distributed", "torch.nn.parallel", "torch._utils", "torch.cuda")


def misfit(
    error: Exception, batch: Any, updates: int, later: str = "this batch differs from those before"
) -> RunError | None:
    """Return the error to raise if a batch does not fit; None if something else failed.

    An error in the user's own code keeps its traceback; so does one of memory, of a device or of
    another process. `updates`: the number of updates before; `later`: what is said after one.
    """
    if not is_misfit(error):
        return None
    modules = [*_modules(error.__traceback__)]
    reason = " ".join(str(error).split())[:300]
    given = spelled(batch)
    if "trainer.tasks.losses" in modules:
        if "Long" in reason or "must be Tensor, not" in reason:
            return SampleError(
                f"the loss asks for class numbers, which are integers: {reason} (batch: {given})"
            )
        return ModelError(
            f"task.loss does not take the model's output and the targets: {reason} (batch: {given})"
        )
    if updates:
        return SampleError(f"{later}: {reason} (batch: {given})")
    where = f"; {failed}" if (failed := failed_layer(error)) else ""
    change = change_for(reason) or (
        "do model, data (channels, image size, classes), transforms and task agree?"
    )
    return ModelError(f"model and data do not fit: {reason} (batch: {given}){where}; {change}")


def is_misfit(error: Exception) -> bool:
    """Return whether torch's or our modules, and no other code, raised the error."""
    modules = [*_modules(error.__traceback__)]
    if not isinstance(error, MISFITS) or hasattr(error, "exit_code"):
        return False
    memory = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
    if memory or "CUDA error" in str(error) or modules[-1].startswith(_FOREIGN):
        return False
    return all(module.partition(".")[0] in _LIBRARIES for module in modules)


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
