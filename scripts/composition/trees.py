"""Functions over composed trees and names, shared by the steps of a composition."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from conf.errors import Problem
from conf.reserved import RESERVED

# What OmegaConf raises if a value cannot be resolved.
UNRESOLVED = (OmegaConfBaseException, RecursionError, ValueError, TypeError)
_NAMES = "|".join(RESERVED)
_RESERVED = re.compile(r"(?<!\\)\$\{(" + _NAMES + r")\}")
_INTERPOLATION = re.compile(r"\$\{(?!(" + _NAMES + r")\})")


def escape_reserved(node: Any) -> Any:
    """Escape the reserved interpolations, so that resolution leaves them as they are."""
    if isinstance(node, dict):
        return {key: escape_reserved(value) for key, value in node.items()}
    if isinstance(node, list):
        return [escape_reserved(value) for value in node]
    return _RESERVED.sub(r"\\${\1}", node) if isinstance(node, str) else node


def unfinished(node: Any, incomplete: bool, key: str = "") -> Iterator[str]:
    """Yield the keys of unresolved values: interpolations, and `???` if `incomplete`."""
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from unfinished(child, incomplete, f"{key}.{name}" if key else str(name))
    elif isinstance(node, str) and (_INTERPOLATION.search(node) or (incomplete and node == "???")):
        yield key


def keys_below(node: Any, key: str) -> Iterator[str]:
    """Yield the keys of nested sections below `key`."""
    for name, child in node.items() if isinstance(node, dict) else ():
        yield f"{key}.{name}"
        yield from keys_below(child, f"{key}.{name}")


def without(node: Any, keys: Collection[str], key: str = "") -> Any:
    """Return a copy of a tree in which the values of `keys` are missing."""
    if key in keys:
        return "???"
    if isinstance(node, dict):
        return {n: without(v, keys, f"{key}.{n}" if key else str(n)) for n, v in node.items()}
    if isinstance(node, list):
        return [without(v, keys, f"{key}.{i}") for i, v in enumerate(node)]
    return node


def resolution_problems(node: Any, key: str) -> Iterator[Problem]:
    """Resolve each leaf of an OmegaConf tree and yield a problem for each failure.

    References to a missing value are skipped: the missing value is reported itself.
    """
    for name in node if isinstance(node, Mapping) else range(len(node)):
        here = f"{key}.{name}" if key else str(name)
        try:
            child = node[name]
        except UNRESOLVED as error:
            if unset := re.search(r"Environment variable '(\w+)' not found", str(error)):
                way = f"set it, or give a default: ${{oc.env:{unset[1]},VALUE}}"
                yield Problem(here, f"the environment variable {unset[1]} is not set", way)
            elif "MissingMandatory" not in f"{type(error).__name__} {error}":
                yield Problem(here, first_lines(error))
            continue
        if isinstance(child, Mapping | Sequence) and not isinstance(child, str | bytes):
            yield from resolution_problems(child, here)


def first_lines(error: BaseException) -> str:
    """Return an exception's message in one line, without Hydra's search path and URLs."""
    lines = [line.strip() for line in str(error).split("Config search path:")[0].splitlines()]
    kept = [x for x in lines if x and not x.startswith(("full_key:", "object_type=", "See http"))]
    return " ".join(kept)[:600] or type(error).__name__


def inside(config_path: str) -> bool:
    """Return whether a config's path stays inside the folder."""
    plain = not os.path.isabs(config_path) and ".." not in Path(config_path).parts
    return plain and "\0" not in config_path
