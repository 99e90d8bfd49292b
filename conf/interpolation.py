"""Walks over plain containers, and checks of what their interpolations (`${...}`) refer to.

Resolving `a: ${b}${b}`, `b: ${c}${c}` and so on takes time exponential in the length of the chain,
and a loop ends only when Python's stack does. Both are found here in linear time, before anything
is resolved.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from regimen.conf.errors import Problem, nearest
from regimen.conf.json_text import nesting
from regimen.conf.other_words import RESOLVERS as OTHERS

RESERVED = ("total_steps", "steps_per_epoch")  # open until the length of the training is known
CLASSES = "data.num_classes"  # if it is null, open until the classes are counted in the data
# `${data.train.NAME}`: an attribute of the training set, open until that is, unless its node has
# such a key. Not for what the data are made with.
OF_TRAINING_SET = re.compile(r"(?<!\\)\$\{(data\.train\.[A-Za-z_]\w*)\}")
_MAKES_DATA = ("data.", "transforms.train.", "transforms.eval.")
MAX_SIZE = 200_000  # characters and values, once everything is written out
MAX_CHAIN = 100  # keys, each within or referring to the next
MAX_INTERPOLATIONS = 1000  # in all texts together: OmegaConf takes half a millisecond for one
MAX_NESTING = 20  # of interpolations and of brackets in a text with interpolations
_REFERRING = ("oc.select", "oc.dict.keys", "oc.dict.values")  # resolvers whose argument is a key
RESOLVERS = ("oc.env", "oc.decode", "now", *_REFERRING)
# The body of an interpolation: a resolver and the first of its arguments, or a key alone.
_REFERENCE = re.compile(r"(?s)^(?:\s*([\w.]+)\s*:)?([^,]*)")


def open_attributes(root: Any) -> dict[str, list[str]]:
    """Return the attributes of the training set that interpolations ask for, as `data.train.NAME`.

    With each, the keys that ask for it.
    """
    data = root.get("data")
    node = data.get("train") if isinstance(data, dict) else None
    if not isinstance(node, dict) or "_target_" not in node:
        return {}
    found: dict[str, list[str]] = {}
    for key, text in leaves(root):
        if isinstance(text, str) and not key.startswith(_MAKES_DATA):
            for attribute in OF_TRAINING_SET.findall(text):
                if attribute.rpartition(".")[2] not in node:
                    found.setdefault(attribute, []).append(key)
    return found


def join(key: str, name: object) -> str:
    """Return the key of an entry of the section or list at `key`, by its name or number."""
    return f"{key}.{name}" if key else str(name)


def children(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each entry of a section or list; nothing for other values."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield join(key, name), child
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield join(key, index), child


def above(key: str, among: Container[str]) -> str:
    """Return the key itself or the nearest one above it that is among others; "" if none is."""
    while key and key not in among:
        key = key.rpartition(".")[0]
    return key


def is_below(key: str | None, other: str) -> bool:
    """Return whether a key is another one, or lies within it; None lies nowhere."""
    return key is not None and f"{key}.".startswith(f"{other}.")


def under(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted path is one of `prefixes`, or below one."""
    return any(is_below(path, prefix) for prefix in prefixes)


def is_related(key: str, keys: Iterable[str]) -> bool:
    """Return whether a key is one of others, contains one of them, or lies within one."""
    return any(is_below(key, other) or is_below(other, key) for other in keys)


def walk(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of a node and of everything in it, outer ones first."""
    yield key, node
    for child_key, child in children(node, key):
        yield from walk(child, child_key)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of everything that is neither a section nor a list."""
    for child_key, child in walk(node, key):
        if not isinstance(child, dict | list):
            yield child_key, child


def followers(values: Mapping[str, Any], key: str) -> list[str]:
    """Return the arguments of data sets and of the task with a key's value, in a resolved tree.

    The tokenizer of a language model's data is in the folder that `model.name` says.
    """
    known = dict(leaves(values))
    found = []
    for name, value in leaves({"data": values.get("data"), "task": values.get("task")}):
        is_argument = re.fullmatch(r"(data\.\w+|task)(\.\w*[a-z_]\w*)+", name) is not None
        if is_argument and key in known and value == known[key]:
            found.append(name)
    return found


def mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of plain containers in which each part is changed, inner parts first."""
    if isinstance(node, dict):
        node = {name: mapped(child, change) for name, child in node.items()}
    elif isinstance(node, list | tuple):
        node = [mapped(child, change) for child in node]
    return change(node)


def excessive(root: Any) -> Iterator[Problem]:
    """Yield why OmegaConf would take too long to read the texts: interpolations too many or deep.

    The time is linear in the length of the texts.
    """
    count = 0
    for key, text in leaves(root):
        if not isinstance(text, str) or "${" not in text:
            continue
        count += text.count("${")
        if nesting(re.findall(r"[\[\]{}]", text)) > MAX_NESTING:
            yield Problem(key, f"its interpolations are nested deeper than {MAX_NESTING}")
            return
    if count > MAX_INTERPOLATIONS:
        yield Problem(
            "", f"{count} interpolations are too many: there may be {MAX_INTERPOLATIONS} in all"
        )


def fill(node: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of plain containers with the reserved interpolations replaced.

    `values`: by name, such as `total_steps`; an interpolation without a value stays. A text that is
    nothing but the interpolation becomes the value itself.
    """
    replacements = {f"${{{name}}}": value for name, value in values.items() if value is not None}

    def change(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        for name, value in replacements.items():
            if text == name:
                return value
            text = text.replace(name, str(value))
        return text

    return mapped(node, change)


class Interpolations:
    """The references of interpolations in unresolved containers, and what is wrong with them."""

    def __init__(self, root: Any) -> None:
        """Follow all of them: loops, dead ends and explosions are problems."""
        self.problems = list(excessive(root))
        self.read = set[str]()  # the keys that are referred to
        self._nodes = dict(walk(root))  # everything, by key
        self._attributes = open_attributes(root)
        self._origins = dict[str, str]()  # keys that are a single `${...}`: the key it refers to
        self._from_environment = set[str]()  # keys to which `oc.env` contributes
        self._sizes = dict[str, int]()
        self._path = list[str]()  # the keys from the root to the one that is visited
        if self.problems:
            return
        size = self._size("", root)
        if size > MAX_SIZE and not self.problems:
            key = next(key for key, size in self._sizes.items() if size > MAX_SIZE)
            self._note(key, f"its interpolations write out to more than {MAX_SIZE} characters")

    def from_environment(self, key: str) -> bool:
        """Return whether an environment variable contributes to the text at a key."""
        return above(self.source(key), self._nodes) in self._from_environment

    def source(self, key: str) -> str:
        """Return the key whose value `key`, or a section above it, takes over."""
        visited = set()
        while (taking := above(key, self._origins)) and key not in visited:
            visited.add(key)
            key = self._origins[taking] + key.removeprefix(taking)
        return key

    def _size(self, key: str, node: Any) -> int:
        """Return how large a node is once it is resolved, at most MAX_SIZE + 1.

        Each node is visited once.
        """
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
        if isinstance(node, str):
            size = 1 + len(node)
            parts = self._references(key, node)
        else:
            size = 1
            parts = children(node, key)
        for part_key, part in parts:
            size += self._size(part_key, part)
            if part_key in self._from_environment:
                self._from_environment.add(key)
        self._path.pop()
        self._sizes[key] = min(size, MAX_SIZE + 1)
        return self._sizes[key]

    def _references(self, key: str, text: str) -> Iterator[tuple[str, Any]]:
        """Yield the key and the node that each interpolation of a text refers to."""
        for body in _bodies(text):
            ((resolver, reference),) = _REFERENCE.findall(body)
            self._check_resolver(key, resolver, body)
            if body in RESERVED or (resolver and resolver not in _REFERRING):
                continue
            if body in self._attributes and not key.startswith(_MAKES_DATA):
                continue
            target = self._absolute(reference.strip(), key)
            if target is None:
                continue
            existing = above(target, self._nodes)
            node = self._nodes[existing]
            # A target below a node that is itself an interpolation cannot be looked up before that
            # one is resolved: the reference leads to the node.
            if existing == target or (isinstance(node, str) and "${" in node):
                self.read.add(target)
                if text == f"${{{body}}}" and not resolver and "${" not in body:
                    self._origins[key] = target
                yield target, node
            elif not resolver:  # oc.select has a default for what does not exist
                match = nearest(target, self._nodes)
                hint = f"did you mean ${{{match}}}?" if match else None
                self._note(key, f"${{{body}}} refers to nothing", hint)

    def _check_resolver(self, key: str, resolver: str, body: str) -> None:
        if resolver == "oc.env":
            self._from_environment.add(key)
        elif resolver == "oc.decode" and "\\" in body:
            self._note(key, "oc.decode takes no escaped interpolations")
        elif resolver and resolver not in RESOLVERS:
            self._note(
                key,
                f"${{{resolver}:...}} is not available: there are {', '.join(RESOLVERS)}",
                OTHERS.get(resolver),
            )

    def _note(self, key: str, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem(key, message, hint))

    def _absolute(self, reference: str, key: str) -> str | None:
        """Return the full key that a reference stands for; None if it stands for none.

        A reference that is itself computed (`${a.${b}}`) stands for all of its section.
        """
        static, computed, _ = reference.partition("${")
        static = re.sub(r"\[['\"]?([^\[\]'\"]*)['\"]?\]", r".\1", static)  # a[0] is a.0
        if computed:
            static = static.rpartition(".")[0]
            if not static:
                self._note(key, f"{reference!r} could refer to anything")
                return None
        if not static.startswith("."):
            return static
        # Each dot in front leads one section up.
        rest = static.lstrip(".")
        sections = key.split(".")[: -(len(static) - len(rest))]
        return ".".join([*sections, rest]).rstrip(".") or None


def _bodies(text: str) -> list[str]:
    """Return the text between the braces of each interpolation, of nested ones too, in order."""
    open_braces = list[int | None]()  # where the body of each begins; None: a brace of the text
    spans = []
    for match in re.finditer(r"(?<!\\)\$\{|[{}]", text):
        if match[0] == "${":
            open_braces.append(match.end())
        elif match[0] == "{":
            open_braces.append(None)
        elif open_braces:
            start = open_braces.pop()
            if start is not None:
                spans.append((start, match.start()))
    return [text[start:end] for start, end in sorted(spans)]
