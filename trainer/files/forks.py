"""Descriptors that a forked process closes: it can outlive the process that opened them."""

import os

_kept: set[int] = set()
_registered: list[bool] = []  # once, and only by a process that keeps something


def keep_from_children(descriptor: int) -> None:
    """Have processes forked from here on close their copy of `descriptor`."""
    if not _registered:
        os.register_at_fork(after_in_child=_close_all)
        _registered.append(True)
    _kept.add(descriptor)


def forget(descriptor: int) -> bool:
    """Leave `descriptor` to its owner again, who may close it unless a fork has: false."""
    found = descriptor in _kept
    _kept.discard(descriptor)
    return found


def _close_all() -> None:
    while _kept:
        os.close(_kept.pop())
