"""Trade time for memory: recompute activations of chosen modules in the backward pass."""

from __future__ import annotations

import fnmatch
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
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
            _refuse_chance(model.get_submodule(name), f"{name}.")
            _wrap(model.get_submodule(name))
    return chosen


def checkpoint_segments(model: nn.Module, segments: int) -> None:
    """Checkpoint an `nn.Sequential` in `segments` segments of layers."""
    if not isinstance(model, nn.Sequential):
        message = f"needs an nn.Sequential, but the model is a {type(model).__name__}"
        raise ModelError(Problem(f"{_KEY}_segments", message, f"name modules in {_KEY} instead"))
    if not 1 <= segments <= len(model):
        message = f"{segments} segments, but the model has {len(model)} layers"
        raise ModelError(Problem(f"{_KEY}_segments", message))
    _refuse_chance(model)
    plain, layers = model.forward, list(model)
    size = len(layers) // segments  # as torch.utils.checkpoint.checkpoint_sequential cuts
    bounds = [size * i for i in range(segments)]

    def forward(x: Any) -> Any:
        if not model.training:
            return plain(x)  # type: ignore[no-untyped-call]
        for start in bounds[:-1]:
            run = functools.partial(_run, layers[start : start + size])
            x = checkpoint(run, x, use_reentrant=False, context_fn=_contexts(model))
        return _run(layers[bounds[-1] :], x)  # its activations are needed immediately

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
    """State at the start of a forward pass, restored for its recomputation.

    That is buffers (BatchNorm's statistics, vectors of spectral norm), attributes that are
    assigned (a counter), and generators: the global ones of Python and numpy, and those that
    modules hold. torch restores its own global ones. A recomputation changes no state.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Record the state that the pass changes."""
        before = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        attributes = [(vars(m), dict(vars(m))) for m in self._module.modules()]
        generators = [(g, _state(g)) for g in (random, np.random, *_generators(self._module))]
        yield
        # Buffers that did not change, such as masks, are not kept, to save memory. BatchNorm's
        # kernels write to its statistics without a new tensor version.
        moved = {
            owner
            for owner, name, buffer, version, _ in before
            if isinstance(owner, _NormBase)
            or owner._buffers.get(name) is not buffer
            or buffer._version != version
        }
        self._buffers = [(m, name, copy) for m, name, _, _, copy in before if m in moved]
        self._attributes = [(own, _differing(then, own)) for own, then in attributes]
        self._generators = [(g, s) for g, s in generators if not _same(s, _state(g))]

    @contextmanager
    def repetition(self) -> Iterator[None]:
        """Start with the state of the first pass; restore the present state at the end."""
        # Buffers are replaced, not written to, as the backward pass may use them.
        kept = [(owner, name, owner._buffers.get(name)) for owner, name, _ in self._buffers]
        attributes = [(own, dict(own)) for own, _ in self._attributes]
        generators = [(g, _state(g)) for g, _ in self._generators]
        try:
            for owner, name, copy in self._buffers:
                owner._buffers[name] = copy.clone()
            for own, values in self._attributes:
                _assign(own, values)
            for generator, state in self._generators:
                _set_state(generator, state)
            yield
        finally:
            for owner, name, buffer in kept:
                owner._buffers[name] = buffer
            for own, values in attributes:
                _assign(own, _differing(values, own))
            for generator, state in generators:
                _set_state(generator, state)


_ABSENT = object()  # the attribute does not exist
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _differing(wanted: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the wanted values of the names whose value now is different or missing."""
    names = [*wanted, *(name for name in now if name not in wanted)]
    values = {name: wanted.get(name, _ABSENT) for name in names}
    return {name: v for name, v in values.items() if now.get(name, _ABSENT) is not v}


def _assign(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _generators(module: nn.Module) -> list[Any]:
    """Return the generators that are attributes of a module or of one within it, each once."""
    found = (v for m in module.modules() for v in _values(vars(m)) if isinstance(v, _KINDS))
    return list({id(value): value for value in found}.values())


def _values(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the attributes, and the members of those that are containers."""
    for value in attributes.values():
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def _refuse_chance(module: nn.Module, prefix: str = "") -> None:
    """Raise ModelError for generators without state, which a recomputation cannot restore."""
    for name, inner in module.named_modules():
        if any(isinstance(value, random.SystemRandom) for value in _values(vars(inner))):
            path = (prefix + name).rstrip(".") or "the model"
            message = f"{path} holds a random.SystemRandom, whose draws cannot be repeated"
            hint = "use random.Random, or leave the module out"
            raise ModelError(Problem(_KEY, message, hint))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.get_state(legacy=False) if _of_numpy(generator) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator) or _of_numpy(generator):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _of_numpy(generator: Any) -> bool:
    return generator is np.random or isinstance(generator, np.random.RandomState)


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_same(value, other[key]) for key, value in state.items())
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else state == other


class _Repetitions(AbstractContextManager[None]):
    """Enter a new `repetition` each time: for second derivatives a pass is recomputed twice."""

    def __init__(self, start: _Start) -> None:
        self._start = start
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._start.repetition()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
