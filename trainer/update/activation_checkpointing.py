"""Trade time for memory: recompute activations of chosen modules in the backward pass."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.errors import Problem
from trainer.errors import ModelError

_KEY = "trainer.activation_checkpointing"


def checkpoint_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Checkpoint the modules whose full names match a glob; return their names.

    Of nested matches only the outermost is checkpointed. A pattern without a match is an error.
    Names of modules and of the state dict do not change.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            more = ", ..." if len(names) > 12 else ""
            hint = f"there are {', '.join(names[:12])}{more}"
            raise ModelError(Problem(_KEY, f"{pattern!r} matches no module", hint))
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append(name)
            module = model.get_submodule(name)
            module.forward = _recomputed(module, module.forward)
    return chosen


def checkpoint_segments(model: nn.Module, segments: int) -> None:
    """Checkpoint an `nn.Sequential` in `segments` segments of layers."""
    if not isinstance(model, nn.Sequential):
        message = f"needs an nn.Sequential, but the model is a {type(model).__name__}"
        raise ModelError(Problem(f"{_KEY}_segments", message, f"name modules in {_KEY} instead"))
    if not 1 <= segments <= len(model):
        message = f"{segments} segments, but the model has {len(model)} layers"
        raise ModelError(Problem(f"{_KEY}_segments", message))
    layers, size = list(model), len(model) // segments  # as torch's checkpoint_sequential cuts
    bounds = [size * i for i in range(segments)]
    # The activations of the last segment are needed immediately.
    parts = [
        _recomputed(model, functools.partial(_run, layers[start : start + size]))
        for start in bounds[:-1]
    ] + [functools.partial(_run, layers[bounds[-1] :])]
    model.forward = functools.partial(_run, parts)  # type: ignore[method-assign]


def _run(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _recomputed(module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _FrozenStatistics(module)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return forward


class _FrozenStatistics(AbstractContextManager[None]):
    """Let a recomputation move copies of BatchNorm's statistics: the first pass has moved them.

    For second derivatives a pass is recomputed twice, so that this is entered again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [m for m in module.modules() if hasattr(m, "num_batches_tracked")]
        self._kept: list[list[dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._kept.append([dict(norm._buffers) for norm in self._norms])
        for norm in self._norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()

    def __exit__(self, *error: Any) -> None:
        for norm, buffers in zip(self._norms, self._kept.pop(), strict=True):
            norm._buffers.update(buffers)
