"""Find what a `_target_` names, and refuse what may not be named.

A configuration may come from anyone. It can only name what `trainer.targets.nameable` offers, what
lies in packages of the folder where the program was started, and what `--allow-target` allows on
the command line. No YAML can extend the list.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from conf.errors import ConfigError, Problem, did_you_mean, nearest
from trainer.targets.nameable import is_offered, offers, refusal_by_name, refusal_of, split

_ROOTS = ("callbacks", "data", "models", "timm", "torch", "torchmetrics", "torchvision", "trainer")
_OTHERS = ("conf", "scripts")  # ours, of which nothing may be named
_OUR_CHECKOUT = ("benchmarks", "tests")  # importable when started in a checkout

_extra: list[str] = []
_closed: list[str] = []  # folders whose files a configuration may not name


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


def close(folders: Iterable[str]) -> None:
    """Offer no code below folders that hold configurations, for this process."""
    _closed.extend(os.path.realpath(os.path.expanduser(folder)) for folder in folders)


def under(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted path is one of `prefixes`, or below one."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def refusal(path: object) -> str | None:
    """Return why `path` may not be a target, by its name alone; None if it may.

    Imports nothing. It may look for the package in the working folder, without running it.
    """
    if not isinstance(path, str) or not _is_path(path):
        text = repr(path)
        shown = text if len(text) <= 80 else text[:77] + "..."
        return f"{shown} is not the dotted path of a class or function"
    if under(path, _extra) or _in_working_folder(path):
        return None
    listed = split(path)
    if listed is None:
        return f"target {path!r} is not allowed; {_how_to_allow(path)}"
    if (reason := refusal_by_name(*listed)) is None:
        return None
    # Something that is named by where it is defined has a public name as well.
    module, last = listed[0], path.rpartition(".")[2]
    public = "." in listed[1] and refusal_by_name(module, last) is None
    known = public and hasattr(sys.modules.get(module), last)
    hint = f"; did you mean '{module}.{last}'?" if known else ""
    return f"{path!r} is not allowed: {reason}{hint}"


def locate(path: str) -> Any:
    """Import and return the class or function that `path` names.

    Raises TargetError if it is refused or not found. Exceptions raised by an allowed module while
    it is imported pass through.
    """
    if (reason := refusal(path)) is not None:
        raise TargetError(reason)
    listed = None if under(path, _extra) else split(path)
    if listed is None:
        return _of_users(path)
    module = found = _import_module(listed[0], path)
    for part in listed[1].split("."):
        found = _attribute(found, part, path)
    if isinstance(found, ModuleType):
        raise TargetError(f"{path!r} is not allowed: it is a module")
    _check_callable(path, found)
    if (reason := refusal_of(module, listed[1], found)) is not None:
        raise TargetError(f"{path!r} is not allowed: {reason}")
    return found


def _of_users(path: str) -> Any:
    """Return an object of the user's packages, or of those given to `allow`."""
    root, *names = path.split(".")
    folder = _working_folder()
    if _in_working_folder(path) and not {folder, ""} & set(sys.path):
        sys.path.append(folder)  # after all that is installed
    parent: Any = None
    found: Any = _import_module(root, path)
    for name in names:
        inner = f"{getattr(found, '__name__', '')}.{name}"
        package = isinstance(found, ModuleType) and hasattr(found, "__path__")
        if package and not hasattr(found, name) and importlib.util.find_spec(inner):
            _import_module(inner, path)
        parent, found = found, _attribute(found, name, path)
        if isinstance(found, ModuleType) and found.__name__ != inner:
            raise TargetError(f"{path!r} is not allowed: it is in module {found.__name__}")
    _check_callable(path, found)
    of_class = isinstance(found, type) or getattr(found, "__self__", None) is parent
    if isinstance(parent, type) and not of_class:
        raise TargetError(f"{path!r} is not allowed: it is a method, name a class or a function")
    owner = getattr(found, "__module__", None) or type(found).__module__
    known = path in _extra or under(owner, _extra) or _in_working_folder(owner)
    if not known and not is_offered(found):
        raise TargetError(f"{path!r} is not allowed: it belongs to {owner}; {_how_to_allow(owner)}")
    return found


def _import_module(name: str, path: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{name}.".startswith(f"{missing}."):
            message = f"no package {name!r} is installed, which {path!r} needs"
            raise TargetError(message) from error
        error.imported_for = path  # type: ignore[attr-defined]
        raise  # the module exists, and something in it fails
    if module.__name__ != name:
        raise TargetError(f"{path!r} is not allowed: {name} is really {module.__name__}")
    return module


def _attribute(holder: Any, name: str, path: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        place = getattr(holder, "__name__", type(holder).__name__)
    message = f"target {path!r} does not exist: {place} has no {name!r}"
    hint = did_you_mean(name, [n for n in dir(holder) if not n.startswith("_")])
    raise TargetError(Problem("", message, hint))


def _check_callable(path: str, found: Any) -> None:
    if not callable(found):
        raise TargetError(f"target {path!r} cannot be called: it is a {type(found).__name__}")


def _in_working_folder(path: str) -> bool:
    """Return whether a path leads into a module or package of the working folder."""
    root, folder = path.partition(".")[0], _working_folder()
    if root in sys.stdlib_module_names or root in (*_ROOTS, *_OTHERS):
        return False
    if root in _OUR_CHECKOUT and Path(folder) == Path(__file__).resolve().parents[2]:
        return False
    if not _is_offered_there(path, Path(folder)):
        return False
    if (module := sys.modules.get(root)) is not None:
        return _places(module.__spec__) == {folder}
    finder = importlib.machinery.PathFinder
    # An installed package of the same name is imported first.
    others = [p for p in sys.path if os.path.realpath(p or ".") != folder]
    installed = finder.find_spec(root, others)
    if installed is not None and installed.origin is not None:
        return False
    return _places(finder.find_spec(root, [folder])) == {folder}


def _is_offered_there(path: str, folder: Path) -> bool:
    """Return whether files named by a path are Python modules, or packages with `__init__.py`.

    Nothing below `runs/` or a folder of configurations is: such folders come from others.
    """
    closed = [c for c in (folder / "runs", *map(Path, _closed)) if not folder.is_relative_to(c)]
    place = folder
    for part in path.split("."):
        place /= part
        if any(p.is_relative_to(c) for p in (place, place.resolve()) for c in closed):
            return False
        if not (place / "__init__.py").is_file():
            module = place.with_name(f"{part}.py").is_file()
            return module or (place.parent != folder and not place.is_dir())
    return True


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


def _how_to_allow(path: str) -> str:
    root, folder = path.partition(".")[0], _working_folder()
    files = os.listdir(folder) if os.access(folder, os.R_OK) else []
    here = [name for file in files if (name := file.removesuffix(".py")).isidentifier()]
    near = nearest(root, [*_ROOTS, *here], cutoff=0.75)
    if near not in (None, root) and importlib.machinery.PathFinder.find_spec(root) is None:
        return f"did you mean {near}?"
    module, _, name = path.rpartition(".")
    near = nearest(module, offers(), cutoff=0.85)
    if near not in (None, module):
        return f"did you mean {near}.{name}?"
    # Of installed libraries only the exact path: `torch` as a whole could run anything.
    known = root in sys.stdlib_module_names or root in _ROOTS
    way = "put the package in the folder where you start"
    if Path(folder, root).is_dir():
        way = "give each of its folders an __init__.py"
    return f"if you trust it, start with `--allow-target {path if known else root}`, or {way}"


def _is_path(path: str) -> bool:
    parts = path.split(".")
    return len(path) <= 300 and all(p.isidentifier() and p[:2] != "__" for p in parts)
