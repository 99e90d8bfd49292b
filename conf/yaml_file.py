"""Read a YAML file for its mistakes: syntax, duplicate keys, and words that YAML reads otherwise.

Hydra reads the values; this pass runs before it, because a file may be hostile (aliases that
multiply, nesting without end) and because it alone knows the lines.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from conf.errors import ConfigError, Problem

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 50_000  # after aliases are written out
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_TAGS = ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
# What YAML 1.1 makes of a bare word, where a person is likely to have meant something else.
_TRAPS = (
    (re.compile(r"(?i)yes|no|on|off"), "is read as {}: write true or false, or quote the word"),
    (re.compile(r"[-+]?0[0-9_]+"), "is read as an octal number: drop the zero, or quote it"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "is read in base 60: quote it"),
    (re.compile(r"[-+]?[0-9.]+_[0-9_.]*(e[-+]?[0-9]+)?"), "has an underscore: write the number"),
)

# A word that looks like a key, in a text that goes on over several lines without quotes.
_KEY = re.compile(r"\s([A-Za-z_][\w.]*:\S+)")


@dataclass(slots=True)
class Document:
    """What a file's text says about its keys: their lines, and what is wrong."""

    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    package: str | None = None  # what `# @package` among its first comments says
    readable: bool = True  # False: its values must not be read


def examine(path: Path, name: str) -> Document:
    """Examine one file; `name` is how messages call it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows put a mark first
    except UnicodeDecodeError as error:
        return _unreadable(f"not a UTF-8 text (byte {error.start})", name)
    except OSError as error:
        return _unreadable(f"cannot be read: {error.strerror}", name)
    return examine_text(text, name)


def plain_values(text: str, name: str) -> Any:
    """Return the values of a YAML text from a place that is not trusted.

    Raises ConfigError where it is hostile or broken: aliases that multiply, tags, endless nesting.
    """
    document = examine_text(text, name)
    if not document.readable:
        raise ConfigError(document.problems)
    return yaml.load(text, Loader=_LOADER)


def examine_text(text: str, name: str) -> Document:
    """Examine the text of a file; `name` is how messages call it."""
    if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
        return _unreadable(f"longer than {MAX_BYTES} bytes", name)
    try:
        _limit_depth(text)
        root = yaml.compose(text, Loader=_LOADER)
        document = _walk(root, name) if root is not None else Document()
        document.package = _package(text)
        return document
    except _TooMuchError as error:
        return _unreadable(str(error), name)
    except yaml.YAMLError as error:
        return _unreadable(*_syntax(error, text, name))
    except (RecursionError, ValueError) as error:
        return _unreadable(f"not YAML that can be read: {type(error).__name__}", name)


def _package(text: str) -> str | None:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if found := re.fullmatch(r"#\s*@package\s+(\S+)\s*", line):
            return found[1]
    return None


class _TooMuchError(Exception):
    pass


def _unreadable(message: str, where: str) -> Document:
    return Document(problems=[Problem("", message, file=where)], readable=False)


def _syntax(error: yaml.YAMLError, text: str, name: str) -> tuple[str, str]:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    if mark is not None and "\t" in "".join(text.splitlines()[mark.line : mark.line + 1]):
        what = "a tab, which YAML does not take as indentation: use spaces"
    context = getattr(error, "context", None)
    message = f"YAML syntax: {what}" + (f" ({context})" if context else "")
    return message, f"{name}:{mark.line + 1}" if mark else name


def _limit_depth(text: str) -> None:
    """Count nesting by events, which need no recursion; composing a deep file would."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _TooMuchError(f"nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _walk(root: yaml.Node, name: str) -> Document:
    if not isinstance(root, yaml.MappingNode):
        return _unreadable("expected keys and values (`key: value`)", f"{name}:1")
    if _size(root, {}, set()) > MAX_NODES:
        raise _TooMuchError(f"its aliases write out to more than {MAX_NODES} values")
    document = Document()
    for key, node, problem, readable in _entries(root, ""):
        line = node.start_mark.line + 1
        if problem is not None:
            document.problems.append(Problem(key, problem, file=f"{name}:{line}"))
            document.readable &= readable
        else:
            document.lines.setdefault(key, line)
    return document


def _size(node: yaml.Node, known: dict[int, int], open_: set[int]) -> int:
    """Count the nodes below, an alias as often as it is used."""
    if id(node) in known:
        return known[id(node)]
    if id(node) in open_:
        raise _TooMuchError("an alias contains itself")
    open_.add(id(node))
    children = (
        [c for pair in node.value for c in pair]
        if isinstance(node, yaml.MappingNode)
        else (node.value if isinstance(node, yaml.SequenceNode) else [])
    )
    size = 1 + sum(_size(child, known, open_) for child in children)
    open_.discard(id(node))
    known[id(node)] = min(size, MAX_NODES + 1)
    return known[id(node)]


class _Entry(NamedTuple):
    """A key, the node that holds its line, what is wrong there, and whether it can be read."""

    key: str
    node: yaml.Node
    problem: str | None = None
    readable: bool = True


def _entries(node: yaml.Node, key: str) -> Iterator[_Entry]:
    if node.tag.removeprefix(_PREFIX) not in _TAGS:
        yield _Entry(key, node, f"tag {node.tag!r} is not allowed", readable=False)
    elif isinstance(node, yaml.MappingNode):
        yield from _mapping(node, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            here = f"{key}.{index}"
            yield _Entry(here, child)
            yield from _entries(child, here)
    elif isinstance(node, yaml.ScalarNode) and (trap := _trap(node)) is not None:
        yield _Entry(key, node, trap)


def _mapping(node: yaml.MappingNode, key: str) -> Iterator[_Entry]:
    seen: set[str] = set()
    for name, child in node.value:
        here = f"{key}.{name.value}" if key else str(name.value)
        if not isinstance(name, yaml.ScalarNode):
            yield _Entry(key, name, "a key must be a word", readable=False)
            continue
        if (trap := _trap(name)) is not None:
            yield _Entry(here, name, f"the key {trap}")
        if name.tag == f"{_PREFIX}null":
            yield _Entry(here, name, "a key is null: write a word, or quote it", readable=False)
        if name.value in seen:
            yield _Entry(here, name, "repeated key", readable=False)
        if ":" in name.value and not name.style and _is_empty(child):
            yield _Entry(here, name, f"a blank is missing after the colon of {name.value!r}")
        seen.add(name.value)
        yield _Entry(here, name)
        yield from _entries(child, here)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and not node.style and not node.value


def _trap(node: yaml.ScalarNode) -> str | None:
    if node.style:
        return None
    if node.end_mark.line > node.start_mark.line and (found := _KEY.search(node.value)):
        return f"goes on to the next line: is a blank missing after the colon of {found[1]!r}?"
    for pattern, message in _TRAPS:
        if pattern.fullmatch(node.value):
            truth = str(node.value.lower() in ("yes", "on")).lower()
            return f"{node.value} {message.format(truth)}"
    return None
