"""Keep the table of keys in docs/configuration.md true: `python -m scripts.reference`."""

import dataclasses
import typing
from pathlib import Path

from conf.check import spelled
from conf.fields import REQUIRED, dataclass_in, declared, default_of, is_open, rule_of
from conf.schema import Config
from conf.yaml_file import word

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
START, END = "<!-- keys: python -m scripts.reference -->", "<!-- end of keys -->"


def main() -> None:
    """Rewrite the table in place."""
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


def updated(text: str) -> str:
    """Return the document with its table replaced by a fresh one."""
    before, rest = text.split(START)
    return f"{before}{START}\n{tables()}{END}{rest.split(END)[1]}"


def tables() -> str:
    """Return one table for each section of the schema."""
    return "".join(_tables(Config, "", "The root"))


def _tables(schema: type, key: str, title: str) -> typing.Iterator[str]:
    hints = typing.get_type_hints(schema)
    rows, inner = [], []
    for name, one in declared(schema).items():
        section = dataclass_in(hints[name])
        here = f"{key}.{name}" if key else name
        inner += [(known, here) for known in (section, rule_of(one).words) if known is not None]
        rows.append(_row(here, hints[name], one))
    summary = (schema.__doc__ or "").split("\n")[0]
    yield f"\n### {title}\n\n{summary}\n\n| key | default | takes | meaning |\n|---|---|---|---|\n"
    yield "".join(rows)
    for section, here in inner:
        yield from _tables(section, here, f"`{here}`")


def _row(key: str, annotation: object, one: "dataclasses.Field[object]") -> str:
    rule, default = rule_of(one), default_of(one)
    section = dataclass_in(annotation) is not None
    takes = "see below" if section else spelled(annotation, rule)
    named = annotation == dict[str, dict[str, typing.Any] | None]
    if rule.node or (rule.words and is_open(rule.words)):
        takes = takes.replace("a section of keys", "named nodes" if named else "a node")
    only = f" ({', '.join(rule.strategies)} only)" if rule.strategies else ""
    cells = (f"`{key}`", _default(default), takes, rule.doc + only)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(value: object) -> str:
    if value is REQUIRED:
        return "required"
    if dataclasses.is_dataclass(value):
        return ""
    return f"`{word(value)}`"


if __name__ == "__main__":
    main()
