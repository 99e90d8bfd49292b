"""Files of lines of text, and those with an object of JSON on each line."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from regimen.conf.json_text import plain_json
from regimen.data.errors import DataError, as_data_error, check_regular


class Row(NamedTuple):
    """A line of a file: its name (FILE:LINE), for messages, and its values."""

    name: str
    values: Mapping[str, Any]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text in UTF-8, with or without a byte order mark. Raises DataError."""
    check_regular(path)
    with as_data_error(f"{path}: cannot be read", OSError, UnicodeDecodeError):
        return path.read_text("utf-8-sig").split("\n")


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a jsonl file; empty lines are left out. Raises DataError."""
    check_regular(path)
    errors = (OSError, UnicodeDecodeError)
    with as_data_error(f"{path}: cannot be read", *errors), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            name = f"{path}:{number}"
            with as_data_error(f"{name}: is no JSON", ValueError):
                values = plain_json(line)
                if "\\u" in line:
                    # Half a character, which JSON can spell and no text, name or file can hold.
                    json.dumps(values, ensure_ascii=False).encode()
            if not isinstance(values, dict):
                raise DataError(f"{name}: is no object, but a {type(values).__name__}")
            yield Row(name, values)
