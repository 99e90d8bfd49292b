"""Activation checkpointing: modules whose activations are computed again in the backward pass."""

import fnmatch
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regimen.conf.errors import truncated_list
from regimen.conf.interpolation import under
from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.errors import ModelError

_KEY = "trainer.activation_checkpointing"


def recompute_as_asked(model: nn.Module, options: TrainerConfig) -> list[str]:
    """Let what the options name be recomputed; return the names of the modules.

    Raises ModelError for names without a match, and for a model without such segments.
    """
    compiled = options.compile is not False
    if options.activation_checkpointing_segments is not None:
        checkpoint_segments(model, options.activation_checkpointing_segments, compiled)
    return checkpoint_modules(model, options.activation_checkpointing or [], compiled)


def checkpoint_modules(
    model: nn.Module, patterns: Sequence[str], compiled: bool = False
) -> list[str]:
    """Let the modules whose full names match a glob be recomputed in the backward pass.

    `compiled`: whether the model will be compiled by torch.compile. Of nested matches only the
    outermost is recomputed. Names of modules and of the state dict do not change. Returns the names
    of the modules. Raises ModelError for a pattern without a match.
    """
    names = [name for name, _ in model.named_modules() if name]
    matching = set[str]()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ModelError(
                _KEY, f"{pattern!r} matches no module", f"there are {truncated_list(names, 12)}"
            )
        matching.update(found)
    chosen: list[str] = []
    for name in names:
        if name in matching and not under(name, chosen):
            chosen.append(name)
            module = model.get_submodule(name)
            module.forward = _recomputed(module, module.forward, compiled)
    return chosen


def checkpoint_segments(model: nn.Module, segments: int, compiled: bool = False) -> None:
    """Let the layers of an `nn.Sequential` be recomputed, in so many segments.

    The layers are divided as `torch.utils.checkpoint.checkpoint_sequential` divides them. Raises
    ModelError for another kind of model, and for more segments than layers.
    """
    key = f"{_KEY}_segments"
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            key,
            f"needs an nn.Sequential, but the model is a {type(model).__name__}",
            f"name modules in {_KEY} instead",
        )
    if not 1 <= segments <= len(model):
        raise ModelError(key, f"{segments} segments, but the model has {len(model)} layers")
    layers = list(model)
    size = len(layers) // segments
    bounds = [*(size * i for i in range(segments)), len(layers)]
    runs = [functools.partial(_run, layers[low:high]) for low, high in itertools.pairwise(bounds)]
    # The backward pass begins with the last of several segments: its activations stay.
    recomputed = max(1, len(runs) - 1)
    parts: list[Callable[[Any], Any]] = [
        _recomputed(model, run, compiled) for run in runs[:recomputed]
    ]
    parts += runs[recomputed:]
    model.forward = functools.partial(_run, parts)  # type: ignore[method-assign]


def _run(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _recomputed(
    module: nn.Module, forward: Callable[..., Any], compiled: bool
) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _FrozenStatistics(module)

    @functools.wraps(forward)
    def recomputed_forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    if compiled:
        # torch.compile takes no `context_fn`: it compiles what is around this call, and what is
        # within.
        return torch.compiler.disable(recomputed_forward, recursive=False)  # type: ignore
    return recomputed_forward


class _FrozenStatistics(AbstractContextManager[None]):
    """Let a recomputation update copies of BatchNorm's statistics: the first pass has updated them.

    For second derivatives a pass is recomputed twice, so that this is entered again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [m for m in module.modules() if hasattr(m, "num_batches_tracked")]
        self._saved: list[list[dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._saved.append([norm._buffers for norm in self._norms])
        for norm in self._norms:
            norm._buffers = {
                name: None if buffer is None else buffer.clone()
                for name, buffer in norm._buffers.items()
            }

    def __exit__(self, *error: Any) -> None:
        for norm, buffers in zip(self._norms, self._saved.pop(), strict=True):
            norm._buffers = buffers
