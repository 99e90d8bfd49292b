"""What `${...}` may do, looked at before anything is resolved; and the names that stay open.

Resolving `a: ${b}${b}`, `b: ${c}${c}` and so on takes time exponential in the length of the
chain, and a loop only ends when Python's stack does. Both are found here in linear time.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.errors import Problem, nearest

RESERVED = ("total_steps", "steps_per_epoch")  # open until the length of the training is known
MAX_SIZE = 200_000  # characters and values, once everything is written out
MAX_CHAIN = 100  # keys, each within or referring to the next
RESOLVERS = ("oc.env", "oc.select", "oc.decode", "oc.dict.keys", "oc.dict.values", "now")
_RESOLVER = re.compile(r"\s*([\w.]+)\s*:")


def fill(node: Any, values: Mapping[str, int]) -> Any:
    """Return a copy of plain containers with `${total_steps}` and its like replaced.

    A text that is nothing but the interpolation becomes the number itself; inside a longer one it
    is replaced by its digits. A name that `values` lacks stays as it is.
    """
    if isinstance(node, dict):
        return {key: fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, values) for value in node]
    for name, value in values.items() if isinstance(node, str) else ():
        if node == f"${{{name}}}":
            return value
        node = node.replace(f"${{{name}}}", str(value))
    return node


def join(key: str, name: object) -> str:
    """Return the key of what a section or list at `key` has under a name or number."""
    return f"{key}.{name}" if key else str(name)


def children(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each entry of a section or list; nothing of a value."""
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield join(key, name), child


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of everything that is no section and no list."""
    yield from (one for one in sections(node, key) if not isinstance(one[1], dict | list))


@dataclass(slots=True)
class Interpolations:
    """What the interpolations of unresolved containers refer to, and what is wrong with them."""

    root: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # the keys that are referred to
    taken: dict[str, str] = field(default_factory=dict)  # `${...}` and nothing else: from where
    environment: set[str] = field(default_factory=set)  # keys to which `oc.env` contributes
    _sizes: dict[str, int] = field(default_factory=dict)
    _path: list[str] = field(default_factory=list)  # of the keys that are being followed

    def __post_init__(self) -> None:
        """Follow all of them: loops, dead ends and explosions are problems."""
        if self._size(self.root, "") > MAX_SIZE and not self.problems:
            key = next(key for key, size in self._sizes.items() if size > MAX_SIZE)
            message = f"its interpolations write out to more than {MAX_SIZE} characters"
            self.problems.append(Problem(key, message))

    def from_environment(self, key: str) -> bool:
        """Return whether an environment variable contributes to the text at a key."""
        at = self.source(key)
        while at and not isinstance(_select(self.root, at)[1], str):
            at = at.rpartition(".")[0]
        return at in self.environment

    def source(self, key: str) -> str:
        """Return the key that holds the value which `key`, or a section above it, takes over."""
        seen = {key}
        while True:
            above = key
            while above and above not in self.taken:
                above = above.rpartition(".")[0]
            key = self.taken[above] + key.removeprefix(above) if above else key
            if not above or key in seen:
                return key
            seen.add(key)

    def _size(self, node: Any, key: str) -> int:
        """Return how large a node is once it is resolved; capped, and each node is visited once."""
        if key in self._sizes:
            return self._sizes[key]
        if key and key in self._path:
            loop = " -> ".join([*self._path[self._path.index(key) :], key])
            self.problems.append(Problem(key, f"its interpolation leads back to itself: {loop}"))
            return 0
        if len(self._path) > MAX_CHAIN:
            self.problems.append(Problem(key, "the interpolations that lead here are too many"))
            return 0
        self._path.append(key)
        size = 1
        for here, child in children(node, key):
            size += self._size(child, here)
            self._inherit(key, here)
        if isinstance(node, str):
            size += len(node) + sum(self._follow(body, key, node) for body in _bodies(node))
        self._path.pop()
        self._sizes[key] = min(size, MAX_SIZE + 1)
        return self._sizes[key]

    def _follow(self, body: str, key: str, text: str) -> int:
        """Return the size of what an interpolation within the text of a key refers to."""
        resolver = _RESOLVER.match(body)
        name = resolver[1] if resolver else None
        if name == "oc.env":
            self.environment.add(key)
        if name is not None and name not in RESOLVERS:
            message = f"${{{name}:...}} is not available: there are {', '.join(RESOLVERS)}"
            self.problems.append(Problem(key, message))
        elif name == "oc.decode" and "\\" in body:
            self.problems.append(Problem(key, "oc.decode takes no escaped interpolations"))
        if body in RESERVED or (
            name and name not in ("oc.select", "oc.dict.keys", "oc.dict.values")
        ):
            return 0
        reference = body[resolver.end() :].split(",")[0] if resolver else body
        if (target := self._absolute(reference.strip(), key)) is None:
            return 0
        found, node = _select(self.root, target)
        if not found:
            if not resolver:  # oc.select has a default for what does not exist
                near = nearest(target, [here for here, _ in sections(self.root)])
                hint = f"did you mean ${{{near}}}?" if near else None
                self.problems.append(Problem(key, f"${{{body}}} refers to nothing", hint))
            return 0
        self.read.add(target)
        if text == f"${{{body}}}" and not resolver and "${" not in body:
            self.taken[key] = target
        size = self._size(node, target)
        self._inherit(key, target)
        return size

    def _inherit(self, key: str, other: str) -> None:
        if other in self.environment:
            self.environment.add(key)

    def _absolute(self, reference: str, key: str) -> str | None:
        """Resolve a relative reference; one that is itself computed counts as all of its parent."""
        static, computed, _ = reference.partition("${")
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
        return ".".join([*parents, *([rest] if rest else [])]) or None


def _bodies(text: str) -> list[str]:
    """Return what stands between the braces of each interpolation, nested ones too."""
    begun: list[int | None] = []  # where each open brace's body begins; None: of no interpolation
    found = []
    for match in re.finditer(r"(?<!\\)\$\{|[{}]", text):
        if match[0] != "}":
            begun.append(match.end() if match[0] == "${" else None)
        elif begun and (start := begun.pop()) is not None:
            found.append((start, match.start()))
    return [text[start:end] for start, end in sorted(found)]


def _select(root: Any, key: str) -> tuple[bool, Any]:
    """Find the node at a key; what goes through a node that is an interpolation ends there."""
    node = root
    for name in key.split("."):
        if isinstance(node, str) and "${" in node:
            return True, node
        entries = dict(children(node))
        if name not in entries:
            return False, None
        node = entries[name]
    return True, node


def sections(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key at any depth, and its value."""
    for here, child in children(node, key):
        yield here, child
        yield from sections(child, here)
