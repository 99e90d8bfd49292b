"""What mkdocs runs when it builds the site: the tables of all keys are made from the schema.

They stand nowhere else. `train --help GROUP` prints the same keys.
"""

from collections.abc import Iterator
from inspect import getdoc
from typing import Any, get_args

from regimen.conf.check import describe_type
from regimen.conf.fields import REQUIRED, Key, affects_result, choices, declared, members
from regimen.conf.interpolation import join
from regimen.conf.schema import Config
from regimen.conf.yaml_file import format_scalar

MARK = "<!-- the tables of all keys -->"  # its place in docs/configuration.md


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in the place of the mark."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n".join(tables(Config, "")))


def tables(schema: type, section: str) -> Iterator[str]:
    """Yield the lines of a section's table, then those of the sections in it."""
    title = f"`{section}`" if section else "The root"
    yield from (f"### {title}", "", getdoc(schema) or "", "")
    yield from ("| key | default | takes | meaning | on resume |", "|---|---|---|---|---|")
    keys = declared(schema)
    for name, key in keys.items():
        yield row(join(section, name), key)
    yield ""
    for name, key in keys.items():
        if key.inner_schema is not None:
            yield from tables(key.inner_schema, join(section, name))


def row(name: str, key: Key) -> str:
    """Return the row of one key."""
    changes = "" if affects_result(Config, name) else "may change"
    return f"| `{name}` | {default_of(key)} | {takes(key)} | {meaning(key)} | {changes} |"


def default_of(key: Key) -> str:
    """Return what a key holds if it is left out."""
    if key.default is REQUIRED:
        return "required"
    if key.section is not None and key.default is not None:
        return ""  # the defaults of its own keys
    return f"`{format_scalar(key.default)}`"


def takes(key: Key) -> str:
    """Return what may be given for a key."""
    if key.section is not None:
        return "see below"
    if not key.node and key.nested_schema is None:
        return describe_type(key)
    if bool in members(key.type):  # torch.compile's arguments
        return describe_type(key)
    if get_args(members(key.type)[0])[1] is not Any:
        return "named nodes"
    kinds = ["a node"]
    if key.named_nodes:
        kinds.append("nodes by name")
    if type(None) in members(key.type):
        kinds.append("null")
    return " or ".join(kinds)


def meaning(key: Key) -> str:
    """Return what a key means, and where it has no effect."""
    text = key.doc
    if key.strategies:
        text += f" ({', '.join(key.strategies)} only)"
    if key.idle_with_closure is not None:
        values = [f"{value} " for value in choices(key.type) if key.idle_with_closure(value)]
        text += f" ({''.join(values)}not with LBFGS)"
    return text
