"""The addresses (s3://..., file://...) that may be opened: a configuration may be a stranger's."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from regimen.conf.errors import ConfigError, Problem

# Protocols of places that hold files. fsspec has forty more: some of them pass another address on,
# and `reference` renders templates of the file that it reads.
_FILE_PROTOCOLS = {"file", "http", "https", "s3", "gs", "az", "abfs", "hf"}
_REFUSED_PROTOCOLS = {"reference"}
_DATA_KEY = re.compile(r"data\.(.+\.)?(root|path)")
_typed_protocols = set[str]()  # protocols of the command line


def is_address(place: str) -> bool:
    """Return whether a place is an address, and no path of this machine."""
    return "://" in place


def allow_protocols(texts: Iterable[str]) -> None:
    """Allow the protocols of the addresses in a command line, for the rest of this process."""
    for text in texts:
        _typed_protocols.update(re.findall(r"([\w.+-]+)://", text))


def address_problem(address: str, trusted: bool = False) -> str | None:
    """Return why an address may not be opened; None if it may.

    `trusted`: the address comes from no configuration, so that any protocol of a single place is
    allowed.
    """
    protocol = address.partition("://")[0]
    quoted = repr(address[:100])
    if "::" in address or address.count("://") > 1:
        return f"{quoted} leads from one address to another: give the last one"
    if protocol.lower() in _REFUSED_PROTOCOLS:
        return f"{quoted}: what is read by {protocol}:// can hold code"
    if trusted or protocol in _FILE_PROTOCOLS or protocol in _typed_protocols:
        return None
    return (
        f"{quoted}: {protocol}:// is opened where the command line says it; in a file "
        f"choose of {', '.join(sorted(_FILE_PROTOCOLS))}"
    )


def check_protocol(address: str, trusted: bool = False) -> None:
    """Raise ConfigError for an address that may not be opened."""
    problem = address_problem(address, trusted)
    if problem is not None:
        raise ConfigError("", problem)


def wrong_addresses(values: Iterable[tuple[str, Any]]) -> Iterator[Problem]:
    """Yield the data of a configuration whose address may not be opened.

    `values`: the leaves of the configuration, by key.
    """
    for key, value in values:
        if isinstance(value, str) and is_address(value) and _DATA_KEY.fullmatch(key):
            problem = address_problem(value)
            if problem is not None:
                yield Problem(key, problem)
