"""Walks over plain containers; what `${...}` may do, looked at before anything is resolved.

Resolving `a: ${b}${b}`, `b: ${c}${c}` and so on takes time exponential in the length of the
chain, and a loop only ends when Python's stack does. Both are found here in linear time.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from regimen.conf.errors import Problem, nearest
from regimen.conf.other_words import RESOLVERS as OTHERS

RESERVED = ("total_steps", "steps_per_epoch")  # open until the length of the training is known
CLASSES = "data.num_classes"  # where it is null, open until it is counted in the data
MAX_SIZE = 200_000  # characters and values, once everything is written out
MAX_CHAIN = 100  # keys, each within or referring to the next
MAX_INTERPOLATIONS = 1000  # in all texts together: OmegaConf takes half a millisecond for one
MAX_NESTING = 20  # of interpolations and of brackets in a text with interpolations
_REFERRING = ("oc.select", "oc.dict.keys", "oc.dict.values")
RESOLVERS = ("oc.env", "oc.decode", "now", *_REFERRING)
# A resolver, if there is one, and the first of its arguments; or the key alone.
_REFERENCE = re.compile(r"(?s)^(?:\s*([\w.]+)\s*:)?([^,]*)")


def join(key: str, name: object) -> str:
    """Return the key of what a section or list at `key` has under a name or number."""
    return f"{key}.{name}" if key else str(name)


def children(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each entry of a section or list; nothing of a value."""
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield join(key, name), child


def above(key: str, among: Container[str]) -> str:
    """Return a key, or the nearest one above it that is among others; empty if there is none."""
    while key and key not in among:
        key = key.rpartition(".")[0]
    return key


def is_related(key: str, keys: Iterable[str]) -> bool:
    """Return whether a key is one of others, or contains one, or lies within one."""
    key = f"{key}."
    for other in keys:
        other = f"{other}."
        if key.startswith(other) or other.startswith(key):
            return True
    return False


def walk(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of a node and of everything in it, outer ones first."""
    yield key, node
    for here, child in children(node, key):
        yield from walk(child, here)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of everything that is no section and no list."""
    yield from (one for one in walk(node, key) if not isinstance(one[1], dict | list))


def mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of plain containers in which each part was changed, inner ones first."""
    if isinstance(node, dict):
        node = {name: mapped(child, change) for name, child in node.items()}
    elif isinstance(node, list | tuple):
        node = [mapped(child, change) for child in node]
    return change(node)


def excessive(root: Any) -> Iterator[Problem]:
    """Yield why texts would take OmegaConf too long to read: too many interpolations, or too deep.

    Found in time linear in the length of the texts, before OmegaConf is given one.
    """
    count = 0
    for key, text in leaves(root):
        if not isinstance(text, str) or "${" not in text:
            continue
        count += text.count("${")
        depth = 0
        for bracket in re.findall(r"[\[\]{}]", text):
            depth += 1 if bracket in "[{" else -1
            if depth > MAX_NESTING:
                yield Problem(key, f"its interpolations are nested deeper than {MAX_NESTING}")
                return
    if count > MAX_INTERPOLATIONS:
        yield Problem(
            "", f"{count} interpolations are too many: there may be {MAX_INTERPOLATIONS} in all"
        )


def fill(node: Any, values: Mapping[str, int | None]) -> Any:
    """Return a copy of plain containers with `${total_steps}` and its like replaced.

    A text that is nothing but the interpolation becomes the number itself; inside a longer one it
    is replaced by its digits. A name without a value stays as it is.
    """
    known = {f"${{{name}}}": value for name, value in values.items() if value is not None}

    def change(text: Any) -> Any:
        for name, value in known.items() if isinstance(text, str) else ():
            if text == name:
                return value
            text = text.replace(name, str(value))
        return text

    return mapped(node, change)


class Interpolations:
    """What the interpolations of unresolved containers refer to, and what is wrong with them."""

    def __init__(self, root: Any) -> None:
        """Follow all of them: loops, dead ends and explosions are problems."""
        self.problems = list(excessive(root))
        self.read = set[str]()  # the keys that are referred to
        self._nodes = dict(walk(root))  # all there is, by key
        self._taken = dict[str, str]()  # `${...}` and nothing else: from where
        self._environment = set[str]()  # keys to which `oc.env` contributes
        self._sizes = dict[str, int]()
        self._path = list[str]()  # of the keys that are being followed
        if self.problems:
            return
        if self._size("", root) > MAX_SIZE and not self.problems:
            key = next(key for key, size in self._sizes.items() if size > MAX_SIZE)
            self._note(key, f"its interpolations write out to more than {MAX_SIZE} characters")

    def from_environment(self, key: str) -> bool:
        """Return whether an environment variable contributes to the text at a key."""
        return above(self.source(key), self._nodes) in self._environment

    def source(self, key: str) -> str:
        """Return the key that holds the value which `key`, or a section above it, takes over."""
        seen = set()
        while (taking := above(key, self._taken)) and key not in seen:
            seen.add(key)
            key = self._taken[taking] + key.removeprefix(taking)
        return key

    def _size(self, key: str, node: Any) -> int:
        """Return how large a node is once it is resolved; capped, and each node is visited once."""
        if key in self._sizes:
            return self._sizes[key]
        if key and key in self._path:
            loop = " -> ".join([*self._path[self._path.index(key) :], key])
            self._note(key, f"its interpolation leads back to itself: {loop}")
            return 0
        if len(self._path) > MAX_CHAIN:
            self._note(key, "the interpolations that lead here are too many")
            return 0
        self._path.append(key)
        size, inner = 1, children(node, key)
        if isinstance(node, str):
            size, inner = 1 + len(node), self._targets(key, node)
        for here, child in inner:
            size += self._size(here, child)
            if here in self._environment:
                self._environment.add(key)
        self._path.pop()
        self._sizes[key] = min(size, MAX_SIZE + 1)
        return self._sizes[key]

    def _targets(self, key: str, text: str) -> Iterator[tuple[str, Any]]:
        """Yield what the interpolations of a text refer to."""
        for body in _bodies(text):
            ((name, reference),) = _REFERENCE.findall(body)
            if name == "oc.env":
                self._environment.add(key)
            if name and name not in RESOLVERS:
                known = ", ".join(RESOLVERS)
                self._note(
                    key, f"${{{name}:...}} is not available: there are {known}", OTHERS.get(name)
                )
            elif name == "oc.decode" and "\\" in body:
                self._note(key, "oc.decode takes no escaped interpolations")
            if body in RESERVED or (name and name not in _REFERRING):
                continue
            if (target := self._absolute(reference.strip(), key)) is None:
                continue
            at = above(target, self._nodes)
            node = self._nodes[at]
            # What goes through a node that is an interpolation ends there.
            if at == target or (isinstance(node, str) and "${" in node):
                self.read.add(target)
                if text == f"${{{body}}}" and not name and "${" not in body:
                    self._taken[key] = target
                yield target, node
            elif not name:  # oc.select has a default for what does not exist
                near = nearest(target, self._nodes)
                hint = f"did you mean ${{{near}}}?" if near else None
                self._note(key, f"${{{body}}} refers to nothing", hint)

    def _note(self, key: str, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(key, message, hint))

    def _absolute(self, reference: str, key: str) -> str | None:
        """Resolve a relative reference; one that is itself computed counts as all of its parent."""
        static, computed, _ = reference.partition("${")
        static = re.sub(r"\[['\"]?([^\[\]'\"]*)['\"]?\]", r".\1", static)
        if computed:
            static = static.rpartition(".")[0]
            if not static:
                self._note(key, f"{reference!r} could refer to anything")
                return None
        if not static.startswith("."):
            return static
        rest = static.lstrip(".")
        parents = key.split(".")[: -(len(static) - len(rest))]
        return ".".join([*parents, rest]).rstrip(".") or None


def _bodies(text: str) -> list[str]:
    """Return what stands between the braces of each interpolation, nested ones too."""
    begun = []  # where each open brace's body begins; None: of no interpolation
    found = []
    for match in re.finditer(r"(?<!\\)\$\{|[{}]", text):
        if match[0] != "}":
            begun.append(match.end() if match[0] == "${" else None)
        elif begun and (start := begun.pop()) is not None:
            found.append((start, match.start()))
    return [text[start:end] for start, end in sorted(found)]
