"""Trade time for memory: activations of chosen modules are computed again in backward."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainer.errors import ModelError


def checkpoint_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Checkpoint the modules whose full names match a glob; return their names.

    Of nested matches the outermost is taken. A pattern without a match is an error. State dict
    and module names stay as they are.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ModelError(
                f"trainer.activation_checkpointing: {pattern!r} matches no module; there are "
                f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
            )
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append(name)
            _wrap(model.get_submodule(name))
    return chosen


def checkpoint_segments(model: nn.Module, segments: int) -> None:
    """Checkpoint an `nn.Sequential` in that many runs of layers."""
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"trainer.checkpoint_segments asks for an nn.Sequential, the model is a "
            f"{type(model).__name__}: name modules in trainer.activation_checkpointing instead"
        )
    if not 1 <= segments <= len(model):
        raise ModelError(
            f"trainer.checkpoint_segments={segments}: the model has {len(model)} layers"
        )
    plain, layers = model.forward, list(model)
    size = len(layers) // segments  # as torch.utils.checkpoint.checkpoint_sequential cuts
    bounds = [size * i for i in range(segments)]

    def forward(x: Any) -> Any:
        if not model.training:
            return plain(x)  # type: ignore[no-untyped-call]
        for start in bounds[:-1]:
            run = functools.partial(_run, layers[start : start + size])
            x = checkpoint(run, x, use_reentrant=False, context_fn=_contexts(model))
        return _run(layers[bounds[-1] :], x)  # its activations are needed at once

    model.forward = forward  # type: ignore[method-assign]


def _run(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _wrap(module: nn.Module) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=_contexts(module), **kwargs)

    module.forward = forward


def _contexts(
    module: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    return lambda: (nullcontext(), _Repetitions(module))


class _Repetitions(AbstractContextManager[None]):
    """Enter `frozen_statistics` anew each time: gradients of gradients repeat a pass twice."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = frozen_statistics(self._module)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Keep running statistics while a forward pass is repeated: torch would update them twice.

    With momentum 0 the same kernels run and save the same tensors, and write back what was there.
    """
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, tracked in kept:
            norm.momentum, norm.num_batches_tracked = momentum, tracked
