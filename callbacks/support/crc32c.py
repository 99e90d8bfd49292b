"""The checksum of TensorFlow's records, CRC-32C, which Python's zlib does not have."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BLOCK = 64  # bytes whose remainders are looked up at once
_POLYNOMIAL = 0x82F63B78  # of Castagnoli, its bits reversed


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of `content`.

    Whole blocks are looked up by numpy, some ten times as fast as byte by byte: pictures are large.
    """
    whole = len(content) - len(content) % _BLOCK
    crc, table = _of_blocks(content[:whole]) if whole else 0xFFFFFFFF, _table()
    for byte in content[whole:]:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _of_blocks(content: bytes) -> int:
    """Return the register after blocks.

    The register is linear in what it has read: a block's remainder is the sum (XOR) of one table
    entry for each of its bytes, and that of the register is four more, as if it stood over the
    first four bytes.
    """
    import numpy as np  # the parent of a sweep writes short records and has no numpy

    tables, (a, b, c, d) = _tables()
    found = np.frombuffer(content, np.uint8).reshape(-1, _BLOCK)
    remainders = np.bitwise_xor.reduce(tables[np.arange(_BLOCK), found], axis=1)
    crc = 0xFFFFFFFF
    for rest in remainders.tolist():
        crc = rest ^ a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]
    return crc


@functools.cache
def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0) for crc in table]
    return table


@functools.cache
def _tables() -> tuple[NDArray[np.uint32], list[list[int]]]:
    """Return the remainder of each byte at each place of a block; the first four as lists."""
    import numpy as np

    single = np.array(_table(), np.uint32)
    rows = [single]
    while len(rows) < _BLOCK:
        rows.append(single[rows[-1] & 0xFF] ^ (rows[-1] >> 8))
    tables = np.stack(rows[::-1])
    return tables, tables[:4].tolist()
