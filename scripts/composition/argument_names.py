"""Read from source which arguments a `_target_` takes, without an import.

Unknown arguments are told without importing torch, which takes seconds. What the source does not
show plainly is skipped: signatures are checked once the keys are right.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from conf.errors import Problem, did_you_mean

SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
# Regimen's own keys beside a target's arguments, by section.
OWN_KEYS = {
    "optimizer": ("param_groups", "params", "lr_scheduler", "optimizers"),
    "lr_scheduler": ("interval", "monitor", "warmup", "functions", "schedulers"),
}
_MAX_HOPS = 8  # imports followed to a definition


def argument_problems(
    node: Any, key: str = "", chosen: Callable[[str], bool] = bool
) -> Iterator[Problem]:
    """Yield the arguments, at any depth of `node`, that their targets do not take.

    `chosen` says of a node's key whether the node is looked at.
    """
    for name, child in _children(node):
        yield from argument_problems(child, f"{key}.{name}" if key else str(name), chosen)
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str) or not chosen(key):
        return
    if (known := accepted(node["_target_"])) is None:
        return
    parts = key.split(".")
    own = [n for part in parts for n in OWN_KEYS.get(part, ())]
    for name in node:
        if name not in (*known, *own, *SPECIAL):
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            hint = did_you_mean(str(name), known) or takes
            message = f"{node['_target_']} has no argument {name!r}"
            yield Problem(f"{key}.{name}", message, hint=hint)


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list):
        yield from enumerate(node)


def accepted(path: str, hops: int = 0) -> tuple[str, ...] | None:
    """Return the argument names of a class or function; None if the source does not show them."""
    *modules, name = path.split(".")
    file = _file(modules) if modules and hops < _MAX_HOPS else None
    return None if file is None else _defined(file, tuple(modules), name, hops)


def _file(modules: list[str]) -> Path | None:
    spec = PathFinder.find_spec(modules[0], [*sys.path, os.getcwd()])
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin)
    for module in modules[1:]:
        folder = place.parent
        if place.name != "__init__.py":
            return None
        package, plain = folder / module / "__init__.py", folder / f"{module}.py"
        place = package if package.is_file() else plain
    return place if place.is_file() and place.suffix == ".py" else None


@lru_cache(maxsize=64)
def _body(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []


def _defined(file: Path, modules: tuple[str, ...], name: str, hops: int) -> tuple[str, ...] | None:
    for statement in reversed(_body(file)):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return _of_function(statement)
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return _of_class(statement, file, modules, hops)
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return accepted(_source(statement, file, modules, alias.name), hops + 1)
                if alias.name == "*":
                    starred = accepted(_source(statement, file, modules, name), hops + 1)
                    if starred is not None:
                        return starred
        elif name in _bound(statement):
            return None  # by an assignment, or on a condition
    return None


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement may bind."""
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _source(statement: ast.ImportFrom, file: Path, modules: tuple[str, ...], name: str) -> str:
    """Return the full path of an imported name."""
    package = modules if file.name == "__init__.py" else modules[:-1]
    base = package[: len(package) + 1 - statement.level] if statement.level else ()
    return ".".join([*base, *([statement.module] if statement.module else []), name])


def _of_function(function: ast.FunctionDef, skip: int = 0) -> tuple[str, ...] | None:
    arguments = function.args
    if function.decorator_list or arguments.kwarg:
        return None
    named = [*arguments.posonlyargs, *arguments.args][skip:]
    return tuple(argument.arg for argument in [*named, *arguments.kwonlyargs])


def _of_class(
    found: ast.ClassDef, file: Path, modules: tuple[str, ...], hops: int
) -> tuple[str, ...] | None:
    if found.decorator_list or found.keywords:
        return None
    methods = {s.name: s for s in found.body if isinstance(s, ast.FunctionDef)}
    if "__new__" in methods:
        return None
    if "__init__" in methods:
        return _of_function(methods["__init__"], skip=1)
    if not found.bases:
        return ()
    if len(found.bases) == 1 and isinstance(base := found.bases[0], ast.Name):
        return _defined(file, modules, base.id, hops + 1) if hops < _MAX_HOPS else None
    return None
