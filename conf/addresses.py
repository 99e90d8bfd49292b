"""Which addresses (s3://..., file://...) are opened. A configuration may be a stranger's."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from regimen.conf.errors import ConfigError, Problem

# Each is a place that holds files. fsspec knows forty more: some pass another address on, and
# `reference` renders templates of the file that it reads.
_PROTOCOLS = {"file", "http", "https", "s3", "gs", "az", "abfs", "hf"}
_NEVER = {"reference"}
_OF_DATA = re.compile(r"data\.(.+\.)?(root|path)")
_typed = set[str]()  # protocols of the command line


def is_address(place: str) -> bool:
    """Return whether a place is an address, and no path of this machine."""
    return "://" in place


def allow_protocols(texts: Iterable[str]) -> None:
    """Let the addresses of this process have the protocols that stand in a command line, too."""
    for text in texts:
        _typed.update(re.findall(r"([\w.+-]+)://", text))


def address_problem(address: str, trusted: bool = False) -> str | None:
    """Return why an address is not opened; None if it is.

    `trusted`: no configuration says it, and its protocol may be any that names one place.
    """
    protocol = address.partition("://")[0]
    if "::" in address or address.count("://") > 1:
        return f"{address[:100]!r} leads from one address to another: give the last one"
    if protocol.lower() in _NEVER:
        return f"{address[:100]!r}: what is read by {protocol}:// can hold code"
    if not trusted and protocol not in _PROTOCOLS | _typed:
        known = ", ".join(sorted(_PROTOCOLS))
        return (
            f"{address[:100]!r}: {protocol}:// is opened where the command line says it; in a file "
            f"choose of {known}"
        )
    return None


def check_protocol(address: str, trusted: bool = False) -> None:
    """Raise ConfigError for an address that is not opened."""
    problem = address_problem(address, trusted)
    if problem is not None:
        raise ConfigError("", problem)


def wrong_addresses(values: Iterable[tuple[str, Any]]) -> Iterator[Problem]:
    """Name the data of a configuration that are at an address which is not opened.

    `values`: the keys and values of what is no section.
    """
    for key, value in values:
        if isinstance(value, str) and is_address(value) and _OF_DATA.fullmatch(key):
            problem = address_problem(value)
            if problem is not None:
                yield Problem(key, problem)
