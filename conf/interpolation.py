"""Bound what the interpolations of a configuration can do before they are resolved.

Resolving `a: ${b}${b}`, `b: ${c}${c}` and so on takes time exponential in the length of the
chain, and a loop only ends when Python's stack does. Both are found here in linear time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from conf.errors import Problem, nearest
from conf.reserved import RESERVED

MAX_SIZE = 200_000  # characters and values, once everything is written out
MAX_CHAIN = 100  # keys, each within or referring to the next
RESOLVERS = ("oc.env", "oc.select", "oc.decode", "oc.dict.keys", "oc.dict.values", "now")
_BY_KEY = ("oc.select", "oc.dict.keys", "oc.dict.values")
_RESOLVER = re.compile(r"\s*([\w.]+)\s*:")


def interpolation_problems(raw: dict[str, Any]) -> list[Problem]:
    """List loops, dead ends and explosions among the interpolations of unresolved containers."""
    tracer = _Tracer(raw)
    size = tracer.size(raw, "")
    if size > MAX_SIZE and not tracer.problems:
        message = f"its interpolations write out to more than {MAX_SIZE} characters"
        tracer.problems.append(Problem(tracer.largest(), message))
    return tracer.problems


def references(raw: dict[str, Any]) -> set[str]:
    """Return the keys that the interpolations of unresolved containers refer to."""
    tracer = _Tracer(raw)
    return {
        target
        for key, text in texts(raw, "")
        for body in _bodies(text)
        if (target := tracer.target(body, key)) is not None
    }


def taken_from(raw: dict[str, Any]) -> dict[str, str]:
    """Return for each key that is nothing but an interpolation the key whose value it takes."""
    tracer = _Tracer(raw)
    found = {}
    for key, text in texts(raw, ""):
        bodies = list(_bodies(text))
        if len(bodies) == 1 and text == f"${{{bodies[0]}}}" and not _RESOLVER.match(bodies[0]):
            found[key] = tracer.target(bodies[0], key)
    return {key: target for key, target in found.items() if target is not None}


@dataclass(slots=True)
class _Tracer:
    root: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)  # of the keys that are being followed

    def size(self, node: Any, key: str) -> int:
        """Return how large a node is once it is resolved; capped, and each node is visited once."""
        if key in self.sizes:
            return self.sizes[key]
        if key and key in self.path:
            loop = " -> ".join([*self.path[self.path.index(key) :], key])
            self.problems.append(Problem(key, f"its interpolation leads back to itself: {loop}"))
            return 0
        if len(self.path) > MAX_CHAIN:
            self.problems.append(Problem(key, "the interpolations that lead here are too many"))
            return 0
        self.path.append(key)
        total = 1 + sum(self._parts(node, key))
        self.path.pop()
        self.sizes[key] = min(total, MAX_SIZE + 1)
        return self.sizes[key]

    def _parts(self, node: Any, key: str) -> Iterator[int]:
        if isinstance(node, dict):
            for name, child in node.items():
                yield self.size(child, f"{key}.{name}" if key else str(name))
        elif isinstance(node, list):
            for index, child in enumerate(node):
                yield self.size(child, f"{key}.{index}")
        elif isinstance(node, str):
            yield len(node)
            for body in _bodies(node):
                yield self._follow(body, key)

    def _follow(self, body: str, key: str) -> int:
        target = self.target(body, key)
        if target is None:
            return 0
        found, node = _select(self.root, target)
        if not found:
            self._dead_end(body, target, key)
            return 0
        return self.size(node, target)

    def target(self, body: str, key: str) -> str | None:
        """Return the key that an interpolation refers to; None if it refers to none."""
        resolver = _RESOLVER.match(body)
        if resolver is None:
            return None if body in RESERVED else self._absolute(body, key)
        name = resolver[1]
        if name not in RESOLVERS:
            message = f"${{{name}:...}} is not available: there are {', '.join(RESOLVERS)}"
            self.problems.append(Problem(key, message))
        elif name == "oc.decode" and "\\" in body:
            self.problems.append(Problem(key, "oc.decode takes no escaped interpolations"))
        elif name in _BY_KEY:
            argument = body[resolver.end() :].split(",")[0].strip()
            target = self._absolute(argument, key)
            # oc.select has a default for what does not exist.
            return target if target is not None and _select(self.root, target)[0] else None
        return None

    def _absolute(self, reference: str, key: str) -> str | None:
        """Resolve a relative reference; one that is itself computed counts as all of its parent."""
        static, computed, _ = reference.strip().partition("${")
        static = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", static)
        if computed:
            static = static.rpartition(".")[0]
            if not static:
                self.problems.append(Problem(key, f"{reference!r} could refer to anything"))
                return None
        if not static.startswith("."):
            return static
        rest = static.lstrip(".")
        parents = key.split(".")[: -(len(static) - len(rest))]
        return ".".join([*parents, rest]) if rest else ".".join(parents) or None

    def _dead_end(self, body: str, target: str, key: str) -> None:
        near = nearest(target, _keys(self.root, ""))
        hint = f"did you mean ${{{near}}}?" if near else None
        self.problems.append(Problem(key, f"${{{body}}} refers to nothing", hint=hint))

    def largest(self) -> str:
        """Return the key of the first leaf that alone is too large."""
        return next((k for k, size in self.sizes.items() if size > MAX_SIZE), "")


def _bodies(text: str) -> Iterator[str]:
    """Yield what stands between the braces of each interpolation, nested ones too."""
    for match in re.finditer(r"(?<!\\)\$\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                yield text[match.end() : end]
                break


def texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each leaf that is a text."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from texts(child, f"{key}.{name}" if key else str(name))


def _select(root: Any, key: str) -> tuple[bool, Any]:
    node = root
    for name in key.split("."):
        if isinstance(node, dict):
            found = next((k for k in node if str(k) == name), None)
            if found is None:
                return _through(node, key)
            node = node[found]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return _through(node, key)
    return True, node


def _through(node: Any, key: str) -> tuple[bool, Any]:
    """Let a reference pass that goes through a node which is an interpolation itself."""
    return (True, node) if isinstance(node, str) and "${" in node else (False, None)


def _keys(node: Any, key: str) -> Iterator[str]:
    if key:
        yield key
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _keys(child, f"{key}.{name}" if key else str(name))
