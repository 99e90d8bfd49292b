"""Read YAML files with the lines of their keys and a list of their mistakes; write YAML.

A file may come from anyone. Aliases that multiply, tags and endless nesting are found before any
value is made.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from regimen.conf.errors import ConfigError, Problem, shortened
from regimen.conf.interpolation import (
    CLASSES,
    RESERVED,
    excessive,
    join,
    mapped,
    open_attributes,
)

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 50_000  # after aliases are written out
MAX_KEY = 1000  # characters of a key with those above it: each message repeats them
MAX_DIGITS = 300  # characters of a number: Python reads it in quadratic time
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_TAGS = ("str", "int", "float", "bool", "null", "map", "seq", "merge", "value")
# Each pattern here takes linear time: no two repeats in a row match the same letters.
_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
# `# @package NAME` among the first comments. Its blanks match no line break, so that each line is
# read once.
_PACKAGE = re.compile(r"(?:#.*\n|[ \t\r]*\n)*?#[ \t]*@package[ \t]+(\S+)[ \t\r]*$", re.MULTILINE)
# Bare words that YAML 1.1 reads in a way that a person is not likely to have meant.
_TRAP = re.compile(
    r"(?P<yes>(?i:yes|on))|(?P<no>(?i:no|off))|(?P<octal>[-+]?0[0-9_]+)"
    r"|(?P<sixty>[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)"
    r"|(?P<parted>[-+]?[0-9.]+_[0-9_.]*(?:e[-+]?[0-9]+)?)"
)
_TRAPS = {
    "yes": "is read as true: write true or false, or quote the word",
    "no": "is read as false: write true or false, or quote the word",
    "octal": "is read as an octal number: drop the zero, or quote it",
    "sixty": "is read in base 60: quote it",
    "parted": "has an underscore: write the number",
}
# A word that looks like a key, in a text of several lines without quotes.
_KEY = re.compile(r"\s([A-Za-z_][\w.]*:\S+)")


def _as_omegaconf() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return yaml's resolvers, by first letter, changed to OmegaConf's: 1e-3 is a number."""
    changed = {}
    for first, resolvers in _BASE.yaml_implicit_resolvers.items():
        changed[first] = [pair for pair in resolvers if not pair[0].endswith(":timestamp")]
        if first in "-+.0123456789":
            changed[first].append((f"{_PREFIX}float", _FLOAT))
    return changed


class _Loader(_BASE):  # type: ignore[misc]
    """YAML as OmegaConf reads it: 1e-3 is a number, a date is text."""

    yaml_implicit_resolvers: ClassVar = _as_omegaconf()


@dataclass(slots=True)
class Document:
    """The content of a file: its values, the lines of their keys, and its mistakes."""

    values: Any = field(default_factory=dict)  # a dict; a list if the caller allows one
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    package: str | None = None  # the name behind `# @package` among its first comments
    readable: bool = True  # False: it has no values


def examine(path: Path, name: str) -> Document:
    """Read one file. Messages call it by `name`."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows put a mark in front
    except UnicodeDecodeError as error:
        return _unreadable(f"not a UTF-8 text (byte {error.start})", name)
    except OSError as error:
        return _unreadable(f"cannot be read: {error.strerror}", name)
    return _examine_text(text, name)


def plain_values(text: str, name: str, lists: bool = False) -> Any:
    """Return the values of a YAML text from a place that is not trusted.

    It holds a section; with `lists`, it may hold a list instead. Raises ConfigError if the text is
    broken or hostile: aliases that multiply, tags, endless nesting.
    """
    document = _examine_text(text, name, lists)
    if not document.readable:
        raise ConfigError(document.problems)
    return document.values


def _unreadable(message: str, name: str, line: int | None = None) -> Document:
    where = f"{name}:{line}" if line else name
    return Document(problems=[Problem("", message, file=where)], readable=False)


def _examine_text(text: str, name: str, lists: bool = False) -> Document:
    document = Document()
    try:
        root = _compose_nodes(text)
        if root is not None:
            is_list = lists and isinstance(root, yaml.SequenceNode)
            if not is_list and not isinstance(root, yaml.MappingNode):
                line = root.start_mark.line + 1
                return _unreadable("expected keys and values (`key: value`)", name, line)
            _Examination(document, name).visit(root, "")
        if document.readable:
            document.values = yaml.load(text, Loader=_Loader) or {}
            for problem in excessive(document.values):
                line = document.lines.get(problem.key, 1)
                located = replace(problem, file=f"{name}:{line}")
                document = Document(problems=[located], readable=False)
    except ConfigError as error:
        return _unreadable(str(error), name)
    except yaml.reader.ReaderError as error:
        return _unreadable(f"YAML syntax: {error.reason}", name)
    except yaml.MarkedYAMLError as error:  # all other errors of yaml
        return _syntax_error(error, text, name)
    except (RecursionError, ValueError, ArithmeticError, LookupError) as error:  # as of `!!bool x`
        return _unreadable(f"not YAML that can be read: {type(error).__name__}", name)
    package = _PACKAGE.match(text)
    document.package = package[1] if package else None
    return document


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> Document:
    message = f"YAML syntax: {shortened(str(error.problem))}"
    line = None
    if error.problem_mark:
        line = error.problem_mark.line + 1
        if "\t" in "".join(text.splitlines()[line - 1 : line]):
            message = "YAML syntax: a tab, which YAML does not take as indentation: use spaces"
    if error.context:
        message += f" ({shortened(error.context)})"
    return _unreadable(message, name, line)


def _compose_nodes(text: str) -> yaml.Node | None:
    """Return the nodes of a text. No values are made of them yet.

    Raises ConfigError if that would be dangerous.
    """
    if len(text.encode()) > MAX_BYTES:
        raise ConfigError(f"longer than {MAX_BYTES} bytes")
    # The depth is counted by events, which need no recursion: composing a deep file would.
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels")
    root = yaml.compose(text, Loader=_Loader)
    if root is not None and _size(root, {}, set()) > MAX_NODES:
        raise ConfigError(f"its aliases write out to more than {MAX_NODES} values")
    return root


def _size(node: yaml.Node, sizes: dict[int, int], open_nodes: set[int]) -> int:
    """Return the number of nodes in a node, itself included; an alias counts at each use.

    `sizes`: of the nodes that were counted before. `open_nodes`: those that this one lies in.
    """
    if id(node) in open_nodes:
        raise ConfigError("an alias contains itself")
    if id(node) in sizes:
        return sizes[id(node)]
    open_nodes.add(id(node))
    size = 1
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            size += _size(child, sizes, open_nodes)
    elif isinstance(node, yaml.MappingNode):
        for name, child in node.value:
            size += _size(name, sizes, open_nodes) + _size(child, sizes, open_nodes)
    open_nodes.discard(id(node))
    sizes[id(node)] = min(size, MAX_NODES + 1)
    return sizes[id(node)]


class _Examination:
    """Notes the lines of all keys of a document, and what is wrong with them."""

    def __init__(self, document: Document, file: str) -> None:
        self._document = document
        self._file = file

    def visit(self, node: yaml.Node, key: str) -> None:
        """Examine a node and all nodes in it."""
        if node.tag.removeprefix(_PREFIX) not in _TAGS:
            self._refuse(node, key, f"tag {shortened(node.tag)!r} is not allowed")
        elif _is_long_number(node):
            self._refuse(
                node, key, f"a number of more than {MAX_DIGITS} characters: quote it if it is text"
            )
        elif isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                self._visit_entry(child, child, join(key, index))
        elif isinstance(node, yaml.ScalarNode):
            trap = _trap(node)
            if trap:
                self._note(node, key, trap)
        if isinstance(node, yaml.MappingNode):
            names = set[str]()
            for name, child in node.value:
                self._visit_pair(name, child, key, names)

    def _visit_pair(self, name: yaml.Node, child: yaml.Node, section: str, names: set[str]) -> None:
        """Examine an entry of a mapping; `names`: of the entries before it."""
        if not isinstance(name, yaml.ScalarNode):
            self._refuse(name, section, "a key must be a word")
            return
        key = join(section, name.value)
        if len(key) > MAX_KEY:
            self._refuse(
                name, section, f"a key of more than {MAX_KEY} characters, with those above it"
            )
            return
        if _is_long_number(name):
            self._refuse(name, key, f"a number of more than {MAX_DIGITS} characters: quote it")
        trap = _trap(name)
        if trap:
            self._note(name, key, f"the key {trap}")
        if name.tag == f"{_PREFIX}null":
            self._refuse(name, key, "a key is null: write a word, or quote it")
        if name.value in names:
            self._refuse(name, key, "repeated key")
        is_empty = isinstance(child, yaml.ScalarNode) and not child.style and not child.value
        if ":" in name.value and not name.style and is_empty:
            self._note(
                name, key, f"a blank is missing after the colon of {shortened(name.value)!r}"
            )
        names.add(name.value)
        self._visit_entry(name, child, key)

    def _visit_entry(self, written: yaml.Node, child: yaml.Node, key: str) -> None:
        self._document.lines.setdefault(key, written.start_mark.line + 1)
        self.visit(child, key)

    def _note(self, node: yaml.Node, key: str, message: str) -> None:
        """Note a mistake; the file has values all the same."""
        self._document.problems.append(
            Problem(key, message, file=f"{self._file}:{node.start_mark.line + 1}")
        )

    def _refuse(self, node: yaml.Node, key: str, message: str) -> None:
        """Note a mistake that leaves the file without values."""
        self._note(node, key, message)
        self._document.readable = False


def _is_long_number(node: yaml.Node) -> bool:
    return len(node.value) > MAX_DIGITS and node.tag.removeprefix(_PREFIX) in ("int", "float")


def _trap(node: yaml.ScalarNode) -> str | None:
    """Return how YAML reads a bare word that a person is likely to have meant otherwise."""
    if node.style:
        return None
    if node.end_mark.line > node.start_mark.line:
        key = _KEY.search(node.value)
        if key:
            written = repr(shortened(key[1]))
            return f"goes on to the next line: is a blank missing after the colon of {written}?"
    trap = _TRAP.fullmatch(node.value)
    return f"{shortened(node.value)} {_TRAPS[trap.lastgroup or '']}" if trap else None


# Texts that OmegaConf, or our own reading of YAML, would not read back as text.
_NOT_TEXT = re.compile(
    r"[-+]?(\d[\d_]*)?(\.[\d_]*|_[\d_]*)?([eE][-+]?\d+)?|(?i:yes|no|on|off|y|n)|[-+]?\d[\d_]*(:[0-5]?\d)+.*"
    r"|\?\?\?"
)


def _text(dumper: Any, value: str) -> Any:
    style = "'" if _NOT_TEXT.fullmatch(value) else None
    if not value.isprintable():
        style = '"'  # YAML can escape characters in this style only
    return dumper.represent_scalar(f"{_PREFIX}str", value, style=style)


class _Dumper(yaml.SafeDumper):
    yaml_representers: ClassVar = {**yaml.SafeDumper.yaml_representers, str: _text}

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out: nobody wants to read an anchor."""
        return True


def dump(config: dict[str, Any]) -> str:
    """Return plain containers as YAML that `--config-name` reads back to the very same values."""
    data = config.get("data")
    open_names = [*RESERVED, *open_attributes(config)]
    if isinstance(data, dict) and data.get("num_classes", 0) is None:
        open_names.append(CLASSES)
    plain = _escaped(config, open_names)
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _escaped(node: Any, open_names: Iterable[str]) -> Any:
    """Escape `${` in all texts, so that they are not resolved again when they are read.

    Interpolations of `open_names` stay: they are filled in after the configuration was read.
    """
    names = "|".join(map(re.escape, open_names))
    # Backslashes right before an interpolation are halved when it is read: double them.
    final = re.compile(rf"(\\*)\$\{{(?!({names})\}})")

    def escape(value: Any) -> Any:
        return final.sub(r"\1\1\\${", value) if isinstance(value, str) else value

    return mapped(node, escape)


def format_scalar(value: object) -> str:
    """Return a single value as a command line writes it: `null`, `true`, `0.1`."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
