"""Defer imports of torch and torchvision until something uses them: a third of a start's time.

torch's optimizers and torchvision import `torch._dynamo`, the front end of `torch.compile`, with
sympy and triton, only to mark functions that it must not trace. Until it is loaded, nothing is
traced, and the marks have no effect: they are set when it is loaded. torchvision also imports all
of its networks, operators for boxes and data sets; here each package is executed at its first use.

Four names here are private to torch, which has no public ones for them: `torch._compile` and its
`_disable_dynamo` (the decorator that marks), `__dynamo_disable` (the attribute under which it keeps
the marked form), and `torch._dynamo`. If a version of torch or torchvision lacks one of them, it
is imported as usual; tests/scripts/cli/test_imports.py fails if a version changes them.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

PACKAGES = ("torchvision.datasets", "torchvision.models", "torchvision.ops")
_COMPILER = "torch._dynamo"
Execute = Callable[[ModuleType, Loader], None]


def defer_imports() -> None:
    """Defer the imports of this process from here on; modules already imported stay as they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Find the deferred modules as usual, but give them another loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _MODULES[name])
        return spec


class _Loader(Loader):
    """Wraps a loader: `execute(module, loader)` takes the place of executing the module.

    `execute=None`: a package's `__init__` is executed at the first use of a name of it. Modules of
    the package can be imported before that.
    """

    def __init__(self, loader: Loader, execute: Execute | None) -> None:
        self.loader, self.execute = loader, execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Deferred(spec.name) if self.execute is None else self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        if self.execute is not None:
            self.execute(module, self.loader)


class _Deferred(ModuleType):
    """A package whose `__init__` has not been executed, or not to the end."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__lock = threading.RLock()  # a second thread waits until the first has executed it
        self.__executing = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._execute()
        return ModuleType.__getattribute__(self, name)

    def _execute(self) -> None:
        with self.__lock:
            if type(self) is not _Deferred or self.__executing:
                return  # another thread has executed it, or the package itself uses the name
            assert self.__spec__ is not None
            loader = self.__spec__.loader
            assert loader is not None
            self.__executing = True
            try:
                loader.exec_module(self)
            finally:
                self.__executing = False
            self.__class__ = ModuleType  # type: ignore[assignment]


def _decorator(module: ModuleType, loader: Loader) -> None:
    """Execute `torch._compile`; functions that it decorates are called plainly until it is needed.

    The decorated function looks up its marked form at each call, as an attribute of the plain one.
    Until the compiler is imported, the plain function stands there for its own marked form.
    """
    loader.exec_module(module)
    decorator = vars(module).get(_DECORATOR)
    if decorator is None:
        return  # another version of torch: nothing is deferred

    def deferring(fn: Any = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(deferring, recursive=recursive)
        decorated = decorator(fn, recursive)
        if isinstance(fn, FunctionType) and _COMPILER not in sys.modules:
            setattr(fn, _FORM, fn)
            _unmarked.add(fn)
        return decorated

    setattr(module, _DECORATOR, deferring)


def _tensors(module: ModuleType, loader: Loader) -> None:
    """Execute `torchvision.tv_tensors` with the decorator of `torch._compile`.

    Its own choice, `torch.compiler.disable`, would import the compiler.
    """
    torch = importlib.import_module("torch")
    disable = torch.compiler.disable
    torch.compiler.disable = getattr(torch, _DECORATOR, disable)
    try:
        loader.exec_module(module)
    finally:
        torch.compiler.disable = disable


def _compiler(module: ModuleType, loader: Loader) -> None:
    """Execute `torch._dynamo`; remove the stand-ins, so that functions are really marked."""
    for function in _unmarked:
        delattr(function, _FORM)
    _unmarked.clear()
    loader.exec_module(module)


_DECORATOR, _FORM = "_disable_dynamo", "__dynamo_disable"
_unmarked: WeakSet[Any] = WeakSet()
_MODULES: dict[str, Execute | None] = {
    **dict.fromkeys(PACKAGES),
    "torch._compile": _decorator,
    "torchvision.tv_tensors": _tensors,
    _COMPILER: _compiler,
}
