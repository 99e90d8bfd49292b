"""YAML files: read with the lines of their keys, their mistakes named, and written.

A file may come from anyone: what would make reading it dangerous (aliases that multiply, tags,
nesting without end) is found before its values are made.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from regimen.conf.errors import ConfigError, Problem, shortened
from regimen.conf.interpolation import CLASSES, RESERVED, excessive, join, mapped

MAX_BYTES = 1_000_000
MAX_DEPTH = 40
MAX_NODES = 50_000  # after aliases are written out
MAX_KEY = 1000  # characters of a key with those above it, which each message repeats
MAX_DIGITS = 300  # characters of a number: Python takes a time that is quadratic in them
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_TAGS = ("str", "int", "float", "bool", "null", "map", "seq", "merge", "value")
# Each pattern here takes a time linear in the text: no two repeats in a row match the same letters.
_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
# Among the first comments. Blanks are those of one line, so that each line is read once.
_PACKAGE = re.compile(r"(?:#.*\n|[ \t\r]*\n)*?#[ \t]*@package[ \t]+(\S+)[ \t\r]*$", re.MULTILINE)
# What YAML 1.1 makes of a bare word, where a person is likely to have meant something else.
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
# A word that looks like a key, in a text that goes on over several lines without quotes.
_KEY = re.compile(r"\s([A-Za-z_][\w.]*:\S+)")


class _Loader(_BASE):  # type: ignore[misc]
    """YAML as OmegaConf reads it: 1e-3 is a number, a date is text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [
            *(pair for pair in known if not pair[0].endswith(":timestamp")),
            *([(f"{_PREFIX}float", _FLOAT)] if first in "-+.0123456789" else []),
        ]
        for first, known in _BASE.yaml_implicit_resolvers.items()
    }


@dataclass(slots=True)
class Document:
    """What a file holds: its values, the lines of their keys, and what is wrong."""

    values: Any = field(default_factory=dict)  # a dict, or a list where that is expected
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    package: str | None = None  # what `# @package` among its first comments says
    readable: bool = True  # False: it has no values


def examine(path: Path, name: str) -> Document:
    """Read one file; `name` is how messages call it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows put a mark first
    except UnicodeDecodeError as error:
        return _unreadable(f"not a UTF-8 text (byte {error.start})", name)
    except OSError as error:
        return _unreadable(f"cannot be read: {error.strerror}", name)
    return _examined(text, name)


def plain_values(text: str, name: str, lists: bool = False) -> Any:
    """Return the values of a YAML text from a place that is not trusted: a section.

    `lists`: or a list.

    Raises ConfigError where it is hostile or broken: aliases that multiply, tags, endless nesting.
    """
    document = _examined(text, name, lists)
    if not document.readable:
        raise ConfigError(document.problems)
    return document.values


def _unreadable(message: str, name: str, line: int | None = None) -> Document:
    where = f"{name}:{line}" if line else name
    return Document(problems=[Problem("", message, file=where)], readable=False)


def _examined(text: str, name: str, lists: bool = False) -> Document:
    document = Document()
    try:
        root = _root(text)
        if root is not None:
            is_list = lists and isinstance(root, yaml.SequenceNode)
            if not (is_list or isinstance(root, yaml.MappingNode)):
                line = root.start_mark.line + 1
                return _unreadable("expected keys and values (`key: value`)", name, line)
            _note(document, name, root, "")
        if document.readable:
            document.values = yaml.load(text, Loader=_Loader) or {}
            for problem in excessive(document.values):
                where = f"{name}:{document.lines.get(problem.key, 1)}"
                document = Document(problems=[replace(problem, file=where)], readable=False)
        head = _PACKAGE.match(text)
        document.package = head[1] if head else None
        return document
    except ConfigError as error:
        return _unreadable(str(error), name)
    except yaml.reader.ReaderError as error:
        return _unreadable(f"YAML syntax: {error.reason}", name)
    except yaml.MarkedYAMLError as error:  # all others of yaml's
        what, mark = shortened(str(error.problem)), error.problem_mark
        if mark and "\t" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            what = "a tab, which YAML does not take as indentation: use spaces"
        message = f"YAML syntax: {what}" + (
            f" ({shortened(error.context)})" if error.context else ""
        )
        return _unreadable(message, name, mark.line + 1 if mark else None)
    except (RecursionError, ValueError, ArithmeticError, LookupError) as error:  # of `!!bool x`
        return _unreadable(f"not YAML that can be read: {type(error).__name__}", name)


def _root(text: str) -> yaml.Node | None:
    """Return the nodes of a text, of which no values are made yet.

    Raises ConfigError for a dangerous one.
    """
    if len(text.encode()) > MAX_BYTES:
        raise ConfigError(f"longer than {MAX_BYTES} bytes")
    depth = 0  # counted by events, which need no recursion: composing a deep file would
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels")
    root = yaml.compose(text, Loader=_Loader)
    if root is not None and _size(root, {}, set()) > MAX_NODES:
        raise ConfigError(f"its aliases write out to more than {MAX_NODES} values")
    return root


def _size(node: yaml.Node, known: dict[int, int], open_: set[int]) -> int:
    """Count the nodes below, an alias as often as it is used."""
    if id(node) in open_:
        raise ConfigError("an alias contains itself")
    if id(node) not in known:
        open_.add(id(node))
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in inner for part in pair]
        known[id(node)] = min(1 + sum(_size(c, known, open_) for c in inner), MAX_NODES + 1)
        open_.discard(id(node))
    return known[id(node)]


def _note(document: Document, file: str, node: yaml.Node, key: str) -> None:
    """Note the lines of all keys, and what is wrong with them."""

    def wrong(at: yaml.Node, key: str, message: str, readable: bool = False) -> None:
        place = f"{file}:{at.start_mark.line + 1}"
        document.problems.append(Problem(key, message, file=place))
        document.readable &= readable

    def inside(at: yaml.Node, child: yaml.Node, key: str) -> None:
        document.lines.setdefault(key, at.start_mark.line + 1)
        _note(document, file, child, key)

    if node.tag.removeprefix(_PREFIX) not in _TAGS:
        wrong(node, key, f"tag {shortened(node.tag)!r} is not allowed")
    elif _is_long_number(node):
        wrong(node, key, f"a number of more than {MAX_DIGITS} characters: quote it if it is text")
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            inside(child, child, join(key, index))
    elif isinstance(node, yaml.ScalarNode) and (trap := _trap(node)):
        wrong(node, key, trap, readable=True)
    seen = set()
    for name, child in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(name, yaml.ScalarNode):
            wrong(name, key, "a key must be a word")
            continue
        here = join(key, name.value)
        if len(here) > MAX_KEY:
            wrong(name, key, f"a key of more than {MAX_KEY} characters, with those above it")
            continue
        if _is_long_number(name):
            wrong(name, here, f"a number of more than {MAX_DIGITS} characters: quote it")
        if trap := _trap(name):
            wrong(name, here, f"the key {trap}", readable=True)
        if name.tag == f"{_PREFIX}null":
            wrong(name, here, "a key is null: write a word, or quote it")
        if name.value in seen:
            wrong(name, here, "repeated key")
        empty = isinstance(child, yaml.ScalarNode) and not child.style and not child.value
        if ":" in name.value and not name.style and empty:
            message = f"a blank is missing after the colon of {shortened(name.value)!r}"
            wrong(name, here, message, readable=True)
        seen.add(name.value)
        inside(name, child, here)


def _is_long_number(node: yaml.Node) -> bool:
    number = node.tag.removeprefix(_PREFIX) in ("int", "float")
    return number and len(node.value) > MAX_DIGITS


def _trap(node: yaml.ScalarNode) -> str | None:
    if node.style:
        return None
    if node.end_mark.line > node.start_mark.line and (found := _KEY.search(node.value)):
        word = shortened(found[1])
        return f"goes on to the next line: is a blank missing after the colon of {word!r}?"
    trap = _TRAP.fullmatch(node.value)
    return f"{shortened(node.value)} {_TRAPS[trap.lastgroup or '']}" if trap else None


# Words that OmegaConf, or our own reading of YAML, take for something else than text.
_NOT_TEXT = re.compile(
    r"[-+]?(\d[\d_]*)?(\.[\d_]*|_[\d_]*)?([eE][-+]?\d+)?|(?i:yes|no|on|off|y|n)|[-+]?\d[\d_]*(:[0-5]?\d)+.*"
    r"|\?\?\?"
)


def _text(dumper: Any, value: str) -> Any:
    style = "'" if _NOT_TEXT.fullmatch(value) else None
    if not value.isprintable():
        style = '"'  # the only one in which YAML can escape characters
    return dumper.represent_scalar(f"{_PREFIX}str", value, style=style)


class _Dumper(yaml.SafeDumper):
    yaml_representers: ClassVar = {**yaml.SafeDumper.yaml_representers, str: _text}

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out: nobody wants to read an anchor."""
        return True


def dump(config: dict[str, Any]) -> str:
    """Return plain containers as YAML that `--config-name` reads back to the very same values."""
    data = config.get("data")
    is_counted = isinstance(data, dict) and data.get("num_classes", 0) is None
    plain = _escaped(config, (*RESERVED, CLASSES) if is_counted else RESERVED)
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _escaped(node: Any, names: Iterable[str]) -> Any:
    """Protect `${` in text that is final, so that it is not resolved again.

    These names stay open: they are filled in after the configuration was read.
    """
    # Backslashes right before an interpolation are halved when it is read: double them.
    final = re.compile(rf"(\\*)\$\{{(?!({'|'.join(map(re.escape, names))})\}})")
    return mapped(node, lambda v: final.sub(r"\1\1\\${", v) if isinstance(v, str) else v)


def word(value: object) -> str:
    """Return a single value as a command line writes it: `null`, `true`, `0.1`."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
