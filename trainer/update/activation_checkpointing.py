"""Trade time for memory: activations of chosen modules are computed again in backward."""

from __future__ import annotations

import fnmatch
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
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
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        start = _Start(module)
        return start.first_pass(), _Repetitions(start)

    return contexts


class _Start:
    """What a forward pass began with and has moved: a repetition begins with the same.

    These are buffers (BatchNorm's statistics, a spectral norm's vectors) and the global generators
    of Python and numpy; torch puts its own back. A repetition works on copies and leaves nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._python: Any = None  # None: the pass drew nothing
        self._numpy: Any = None

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Remember what the pass within moves."""
        before = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        python, numpy = random.getstate(), np.random.get_state(legacy=False)
        yield
        # What is as it was, such as a mask, is not kept: memory is what all this is about. The
        # kernels of BatchNorm write to its statistics without counting it as a new version.
        moved = {
            owner
            for owner, name, buffer, version, _ in before
            if isinstance(owner, _NormBase)
            or owner._buffers.get(name) is not buffer
            or buffer._version != version
        }
        self._buffers = [(m, name, copy) for m, name, _, _, copy in before if m in moved]
        self._python = None if random.getstate() == python else python
        self._numpy = None if _same(np.random.get_state(legacy=False), numpy) else numpy

    @contextmanager
    def repetition(self) -> Iterator[None]:
        """Begin as the first pass did, and give everything back as it is."""
        # Tensors are exchanged, not written to: backward may hold them.
        kept = [(owner, name, owner._buffers.get(name)) for owner, name, _ in self._buffers]
        python, numpy = random.getstate(), np.random.get_state(legacy=False)
        try:
            for owner, name, copy in self._buffers:
                owner._buffers[name] = copy.clone()
            if self._python is not None:
                random.setstate(self._python)
            if self._numpy is not None:
                np.random.set_state(self._numpy)
            yield
        finally:
            for owner, name, buffer in kept:
                owner._buffers[name] = buffer
            if self._python is not None:
                random.setstate(python)
            if self._numpy is not None:
                np.random.set_state(numpy)


def _same(state: Any, other: Any) -> bool:
    # Most draws move the position; where one went once around, the key differs.
    a, b = state["state"], other["state"]
    gauss = state["has_gauss"] == other["has_gauss"]
    return bool(gauss and a["pos"] == b["pos"] and np.array_equal(a["key"], b["key"]))


class _Repetitions(AbstractContextManager[None]):
    """Enter `repetition` anew each time: gradients of gradients repeat a pass twice."""

    def __init__(self, start: _Start) -> None:
        self._start = start
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._start.repetition()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
