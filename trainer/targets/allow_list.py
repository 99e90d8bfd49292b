"""Find what a `_target_` names, and refuse what the allow-list does not cover.

A configuration may come from anyone. It can only name what `trainer.targets.nameable` lists, what
lies in packages of the folder where the program was started, and what `--allow-target` allows on
the command line. No YAML can extend the list.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from conf.errors import ConfigError, Problem, did_you_mean, nearest
from trainer.targets.nameable import OFFERS
from trainer.targets.refusals import is_offered, refusal_by_name, refusal_of, split


@dataclass(frozen=True, slots=True)
class RefusedArguments:
    """Arguments of a target through which it would unpickle a file or fetch code."""

    model: str  # argument with the model's name, which must not be an address such as `hf-hub:...`
    unpickled: tuple[str, ...] = (
        "checkpoint_path",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "cache_dir",
    )


# timm loads the files that these arguments name with weights_only=False.
REFUSED_ARGUMENTS = {
    "timm": RefusedArguments("model_name"),
    "models.timm_adapter": RefusedArguments("name"),
}
_INSTALLED = tuple({module.partition(".")[0] for module in OFFERS})
_OUR_OTHERS = ("conf", "scripts")
_OUR_CHECKOUT = ("benchmarks", "tests")  # importable when started in a checkout

_extra: list[str] = []


class TargetError(ConfigError):
    """A `_target_` that is refused, does not exist, or does not take its arguments."""


def allow(packages: Iterable[str]) -> None:
    """Allow further packages (or exact paths) for this process, as `--allow-target` does."""
    for package in packages:
        if not _is_path(package):
            message = f"{package!r} is not the dotted path of a package"
            raise TargetError(Problem("--allow-target", message))
        if package not in _extra:
            _extra.append(package)


def allowed_extra() -> tuple[str, ...]:
    """Return what `allow` was given, for the other processes of the run."""
    return tuple(_extra)


def refusal(path: object) -> str | None:
    """Return why `path` may not be a target, by its name alone; None if it may.

    Imports nothing. It may look for the package in the working folder, without running it.
    """
    if not isinstance(path, str) or not _is_path(path):
        return f"{_shown(path)} is not the dotted path of a class or function"
    if under(path, _extra) or _in_working_folder(path.partition(".")[0]):
        return None
    listed = split(path)
    if listed is None:
        return f"target {path!r} is not allowed; {_how_to_allow(path)}"
    reason = refusal_by_name(*listed)
    return f"{path!r} is not allowed: {reason}{_public_path(*listed)}" if reason else None


def locate(path: str) -> Any:
    """Import and return the class or function that `path` names.

    Raises TargetError if it is refused or not found. Exceptions raised by an allowed module while
    it is imported pass through.
    """
    reason = refusal(path)
    if reason is not None:
        raise TargetError(reason)
    listed = None if under(path, _extra) else split(path)
    return _users(path) if listed is None else _listed(path, *listed)


def _listed(path: str, module_name: str, name: str) -> Any:
    """Return the object that a listed module offers under `name`."""
    module = _import_module(module_name, path)
    found: Any = module
    for part in name.split("."):
        found = _attribute(found, part, path)
    if isinstance(found, ModuleType):
        raise TargetError(f"{path!r} is not allowed: it is a module")
    _check_callable(path, found)
    reason = refusal_of(module, name, found)
    if reason is not None:
        raise TargetError(f"{path!r} is not allowed: {reason}")
    return found


def _users(path: str) -> Any:
    """Return an object of the user's packages, or of those given to `allow`."""
    module, names = _import(path)
    parent: Any = None
    found: Any = module
    for name in names:
        parent, found = found, _attribute(found, name, path)
        if isinstance(found, ModuleType):
            raise TargetError(f"{path!r} is not allowed: it is in module {found.__name__}")
    _check_users(path, parent, found)
    return found


def _import(path: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix of `path` that is a module; return it and the remaining names."""
    root, *names = path.split(".")
    if _in_working_folder(root):
        _append_working_folder()
    module = _import_module(root, path)
    while names and _is_submodule(module, names[0]):
        module = _import_module(f"{module.__name__}.{names.pop(0)}", path)
    return module, names


def _import_module(name: str, path: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            error.imported_for = path  # type: ignore[attr-defined]
            raise  # the module exists, and one that it needs does not
        raise TargetError(f"no package {name!r} is installed, which {path!r} needs") from error
    except Exception as error:
        error.imported_for = path  # type: ignore[attr-defined]
        raise
    if module.__name__ != name:
        raise TargetError(f"{path!r} is not allowed: {name} is really {module.__name__}")
    return module


def _is_submodule(module: ModuleType, name: str) -> bool:
    """Return whether `name` is a submodule of `module`, as opposed to an attribute."""
    known = getattr(module, name, None)
    if isinstance(known, ModuleType):
        return known.__name__ == f"{module.__name__}.{name}"
    if known is not None or not hasattr(module, "__path__"):
        return False
    return importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def _attribute(holder: Any, name: str, path: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        pass
    place = getattr(holder, "__name__", type(holder).__name__)
    message = f"target {path!r} does not exist: {place} has no {name!r}"
    hint = did_you_mean(name, [n for n in dir(holder) if not n.startswith("_")])
    raise TargetError(Problem("", message, hint))


def _check_callable(path: str, found: Any) -> None:
    if not callable(found):
        raise TargetError(f"target {path!r} cannot be called: it is a {type(found).__name__}")


def _check_users(path: str, parent: Any, found: Any) -> None:
    _check_callable(path, found)
    if isinstance(parent, type) and not _bound_to(parent, found):
        raise TargetError(f"{path!r} is not allowed: it is a method, name a class or a function")
    owner = getattr(found, "__module__", None) or type(found).__module__
    if path in _extra or under(owner, _extra) or _in_working_folder(owner.partition(".")[0]):
        return
    if not is_offered(found):
        raise TargetError(f"{path!r} is not allowed: it belongs to {owner}; {_how_to_allow(owner)}")


def _bound_to(parent: type, found: Any) -> bool:
    """Return whether `found` is a class method of `parent`, or a nested class."""
    return isinstance(found, type) or getattr(found, "__self__", None) is parent


def _in_working_folder(root: str) -> bool:
    """Return whether the top-level package `root` lies in the working folder."""
    if root in sys.stdlib_module_names or root in (*_INSTALLED, *_OUR_OTHERS):
        return False
    folder = _working_folder()
    if root in _OUR_CHECKOUT and folder == _our_folder():
        return False
    module = sys.modules.get(root)
    if module is not None:
        return _places(module.__spec__) == {folder}
    finder = importlib.machinery.PathFinder
    # An installed package of the same name is imported first.
    installed = finder.find_spec(
        root, [p for p in sys.path if os.path.realpath(p or ".") != folder]
    )
    if installed is not None and installed.origin is not None:
        return False
    return _places(finder.find_spec(root, [folder])) == {folder}


def _places(spec: Any) -> set[str]:
    """Return the folders that contain the package or module of `spec`."""
    if spec is None:
        return set()
    if spec.submodule_search_locations is not None:
        return {os.path.dirname(os.path.realpath(p)) for p in spec.submodule_search_locations}
    return {os.path.dirname(os.path.realpath(spec.origin))} if spec.origin else set()


def _working_folder() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except FileNotFoundError:
        return ""


def _our_folder() -> str:
    return str(Path(__file__).resolve().parents[2])


def _append_working_folder() -> None:
    """Make the user's packages importable, after all installed ones."""
    folder = _working_folder()
    if not {folder, ""} & set(sys.path):
        sys.path.append(folder)


def _how_to_allow(path: str) -> str:
    root = path.partition(".")[0]
    near = nearest(root, [*_INSTALLED, *_in_folder()], cutoff=0.75)
    if near not in (None, root) and importlib.machinery.PathFinder.find_spec(root) is None:
        return f"did you mean {near}?"
    module, _, name = path.rpartition(".")
    near = nearest(module, OFFERS, cutoff=0.85)
    if near not in (None, module):
        return f"did you mean {near}.{name}?"
    # Of installed libraries only the exact path: `torch` as a whole could run anything.
    known = root in sys.stdlib_module_names or root in _INSTALLED
    return (
        f"if you trust it, start with `--allow-target {path if known else root}`,"
        " or put the package in the folder where you start"
    )


def _in_folder() -> list[str]:
    """Return the names in the working folder that could be packages of the user."""
    try:
        names = [name.removesuffix(".py") for name in os.listdir(_working_folder())]
    except OSError:
        return []
    return [name for name in names if name.isidentifier()]


def _public_path(module: str, name: str) -> str:
    """Return a hint with the public name of something named by where it is defined."""
    last = name.rpartition(".")[2]
    if "." not in name or refusal_by_name(module, last) is not None or module not in sys.modules:
        return ""
    return f"; did you mean '{module}.{last}'?" if hasattr(sys.modules[module], last) else ""


def under(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted path is one of `prefixes`, or below one."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def _is_path(path: str) -> bool:
    parts = path.split(".")
    return len(path) <= 300 and all(p.isidentifier() and p[:2] != "__" for p in parts)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
