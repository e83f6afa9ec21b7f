"""Reads kernels from a trace in Perfetto's own format, as rocprofv3 and rocprof-sys write it (`.pftrace`).

Source: Perfetto's trace_packet.proto, track_event.proto and interned_data.proto. Only slices of the categories of
kernels are read; everything else is stepped over by its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from accelpatch.errors import AccelpatchError
from accelpatch.profiling.dispatch_record import DispatchRecord

CATEGORIES = ("kernel_dispatch", "kernel")  # rocprofv3's; parts of a category's name
BEGIN, END = 1, 2  # of TrackEvent.Type
PACKET, TIMESTAMP, EVENT, INTERNED, SEQUENCE, CLEARED = 1, 8, 11, 12, 10, 41
TYPE, TRACK, NAME, NAME_ID, CATEGORY, CATEGORY_ID = 9, 11, 23, 10, 22, 3

Names = dict[tuple[int, int], str]
Open = dict[tuple[int, int], list[tuple[str, int] | None]]  # (sequence, track) -> slices that have begun


def read(path: Path) -> tuple[list[DispatchRecord], list[str]]:
    """The kernels of a trace, and what was left out: what comes after where it is cut off. Raises AccelpatchError for a
    file that is none, or has no kernels."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise AccelpatchError(f"{path} cannot be read: {error.strerror}") from error
    found, left = list[DispatchRecord](), list[str]()
    names, categories = Names(), Names()
    open_slices: Open = {}
    try:
        for field, packet in fields(data):
            if field == PACKET and isinstance(packet, memoryview):
                _read_packet(packet, names, categories, open_slices, found)
    except (ValueError, IndexError) as error:
        left.append(f"{path}: it is cut off or damaged after {len(found)} kernels ({error})")
    if not found:
        said = "; ".join(left) or "it has no slices of kernels"
        raise AccelpatchError(f"{path} is no Perfetto trace with kernels: {said}; record it with the kernel trace on")
    return found, left


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field of a message of protocol buffers. Raises ValueError where it is cut off."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + size > len(data):
            raise ValueError("a field goes beyond the end")
        part = data[at : at + size]
        yield key >> 3, part if kind == 2 else int.from_bytes(part, "little")
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _read_packet(
    packet: memoryview, names: Names, categories: Names, open_slices: Open,
    found: list[DispatchRecord],
) -> None:  # fmt: skip
    parts = list(fields(packet))
    values = {number: value for number, value in parts if isinstance(value, int)}
    sequence, time = values.get(SEQUENCE, 0), values.get(TIMESTAMP, 0)
    for number, value in parts:
        if number == INTERNED and isinstance(value, memoryview):
            _intern(value, sequence, names, categories)
    for number, value in parts:
        if number != EVENT or not isinstance(value, memoryview):
            continue
        event = dict(fields(value))
        track, kind = (sequence, int(event.get(TRACK, 0))), event.get(TYPE)
        if kind == BEGIN:
            name = _text(event.get(NAME)) or names.get((sequence, event.get(NAME_ID, 0)), "")  # type: ignore[arg-type]
            category = _text(event.get(CATEGORY)) or categories.get((sequence, event.get(CATEGORY_ID, 0)), "")  # type: ignore[arg-type]
            is_kernel = any(one in category.lower() for one in CATEGORIES)
            open_slices.setdefault(track, []).append((name, time) if is_kernel else None)
        elif kind == END and open_slices.get(track):
            begun = open_slices[track].pop()
            if begun is not None:
                found.append(DispatchRecord(begun[0], (time - begun[1]) / 1e3))


def _intern(data: memoryview, sequence: int, names: Names, categories: Names) -> None:
    """InternedData: field 1 has names of categories, field 2 those of events; each an id and a text."""
    for number, entry in fields(data):
        if number in (1, 2) and isinstance(entry, memoryview):
            parts = dict(fields(entry))
            known = parts.get(1)
            if isinstance(known, int):
                (categories if number == 1 else names)[sequence, known] = _text(parts.get(2))


def _text(value: int | memoryview | None) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, memoryview) else ""
