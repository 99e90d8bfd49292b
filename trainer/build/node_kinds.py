"""What the nodes of each section must build: a model, a callback, a sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.callback import Callback
from trainer.task import Task


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object: a subclass of `base`, or a class with all methods of one of `methods`."""

    called: str
    base: type | None = None
    methods: tuple[tuple[str, ...], ...] = ()

    def fits(self, cls: type) -> bool:
        """Return whether objects of a class are of this kind."""
        if self.base is not None:
            return issubclass(cls, self.base)
        return any(all(hasattr(cls, name) for name in names) for names in self.methods)


_FUNCTION = Kind("function", methods=(("__call__",),))
_READ = (("__iter__",), ("__getitem__",))
KINDS: Mapping[str, Kind] = {
    "model": Kind("torch.nn.Module", nn.Module),
    "task": Kind("trainer.task.Task", Task),
    "callbacks": Kind("trainer.callback.Callback", Callback),
    "optimizer": Kind("torch.optim.Optimizer", Optimizer),
    "lr_scheduler": Kind("torch.optim.lr_scheduler.LRScheduler", LRScheduler),
    "transforms": _FUNCTION,
    "loader.sampler": Kind("sampler", methods=(*_READ, ("__call__", "__len__"))),
    "loader.batch_sampler": Kind("batch sampler", methods=(*_READ, ("samples",))),
    "loader.collate_fn": _FUNCTION,
    "loader.worker_init_fn": _FUNCTION,
    "data": Kind(
        "data set (with __getitem__ and __len__, or __iter__)",
        methods=(("__iter__",), ("__getitem__", "__len__")),
    ),
}


def kind_of(key: str) -> Kind | None:
    """Return what the node at `key` must build; None if anything is allowed."""
    if "lr_scheduler" in key.split("."):  # also that of one optimizer among several
        return KINDS["lr_scheduler"]
    found = (kind for prefix, kind in KINDS.items() if f"{key}.".startswith(f"{prefix}."))
    return next(found, None)


def wrong_class(key: str, cls: type) -> str | None:
    """Return why objects of `cls` do not fit `key`; None if they do."""
    kind = kind_of(key)
    if kind is None or kind.fits(cls):
        return None
    return f"makes no {kind.called} but a {cls.__module__}.{cls.__qualname__}"


def wrong_object(key: str, made: Any) -> str | None:
    """Return why an object does not fit `key`; None if it does."""
    return wrong_class(key, type(made))
