"""A trace of torch's profiler as TensorBoard's Profile tab (the plugin `xprof`) reads it.

The plugin reads the protocol buffer XSpace only: planes (a machine's CPU, each device) with lines
(threads, streams) with events. The few fields that a trace has are written here by hand, as no
package without TensorFlow or the plugin itself has the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events
_HOST = "/host:CPU"
# Numbers of fields. XSpace: planes. XPlane: id, name, lines, event_metadata. XLine: id, name,
# timestamp_ns, events. XEvent: metadata_id, offset_ps, duration_ps. XEventMetadata: id, name.
_PLANES, _HOSTNAMES = 1, 4
_ID, _NAME, _LINES, _NAMES = 1, 2, 3, 4
_BEGINNING, _EVENTS = 3, 4
_KEY, _VALUE = 1, 2


def xspace(trace: Mapping[str, Any], host: str) -> bytes:
    """Return a Chrome trace, as torch writes it, as a serialized XSpace."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("dur", 0) > 0]
    planes: dict[str, dict[str, list[Mapping[str, Any]]]] = {_HOST: {}}
    for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        plane, line = _place(event)
        planes.setdefault(plane, {}).setdefault(line, []).append(event)
    begin = min((float(event["ts"]) for event in events), default=0.0)  # microseconds
    written = (
        _message(_PLANES, *_plane(number, name, lines, begin))
        for number, (name, lines) in enumerate(planes.items(), 1)
    )
    return b"".join([*written, _text(_HOSTNAMES, host)])


def _place(event: Mapping[str, Any]) -> tuple[str, str]:
    if event.get("cat") in _ON_DEVICE:
        return f"/device:GPU:{event['pid']}", f"Stream #{event['tid']}"
    return _HOST, f"thread {event['tid']}"


def _plane(
    number: int, name: str, lines: Mapping[str, Sequence[Mapping[str, Any]]], begin: float
) -> Iterable[bytes]:
    """Yield the fields of a plane; its lines begin at `begin`, in microseconds."""
    yield _number(_ID, number)
    yield _text(_NAME, name)
    names = {str(event["name"]) for events in lines.values() for event in events}
    known = {name: number for number, name in enumerate(sorted(names), 1)}
    for number, (line, events) in enumerate(lines.items(), 1):
        fields = [_number(_ID, number), _text(_NAME, line), _number(_BEGINNING, round(begin * 1e3))]
        fields += [_event(event, known, begin) for event in events]
        yield _message(_LINES, *fields)
    for name, number in known.items():
        entry = _message(_VALUE, _number(_ID, number), _text(_NAME, name))
        yield _message(_NAMES, _number(_KEY, number), entry)


def _event(event: Mapping[str, Any], known: Mapping[str, int], begin: float) -> bytes:
    offset, length = (float(event["ts"]) - begin) * 1e6, float(event["dur"]) * 1e6  # picoseconds
    fields = known[str(event["name"])], round(offset), round(length)
    return _message(_EVENTS, *(_number(n, value) for n, value in enumerate(fields, 1)))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
