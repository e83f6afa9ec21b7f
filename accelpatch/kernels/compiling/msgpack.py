"""Reads MessagePack, in which AMD's code objects have their metadata. Source: the MessagePack specification."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

#: first byte -> struct format of a number that follows
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
#: first byte -> struct format of a length, and what follows it
_LENGTHS = {
    0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes"), 0xD9: (">B", "text"), 0xDA: (">H", "text"),
    0xDB: (">I", "text"), 0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip
_SINGLE = {0xC0: None, 0xC2: False, 0xC3: True}


def unpack(data: bytes) -> Any:
    """The first value in `data`. Raises ValueError for an extension type, struct.error or IndexError where it ends."""
    return _value(data, 0)[0]


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """A value and the place after it."""
    first = data[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return (first if first < 0x80 else first - 0x100), at
    if first in _SINGLE:
        return _SINGLE[first], at
    if first in _NUMBERS:
        return struct.unpack_from(_NUMBERS[first], data, at)[0], at + struct.calcsize(_NUMBERS[first])
    if first < 0x90:
        return _KINDS["map"](data, at, first & 0xF)
    if first < 0xA0:
        return _KINDS["list"](data, at, first & 0xF)
    if first < 0xC0:
        return _KINDS["text"](data, at, first & 0x1F)
    if first not in _LENGTHS:
        raise ValueError(f"byte {first:#x} of MessagePack is not known here")
    form, kind = _LENGTHS[first]
    return _KINDS[kind](data, at + struct.calcsize(form), struct.unpack_from(form, data, at)[0])


def _bytes(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    return data[at : at + count], at + count


def _text(data: bytes, at: int, count: int) -> tuple[str, int]:
    return data[at : at + count].decode(), at + count


def _list(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    made = []
    for _ in range(count):
        value, at = _value(data, at)
        made.append(value)
    return made, at


def _map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    flat, at = _list(data, at, 2 * count)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at


_KINDS: dict[str, Callable[[bytes, int, int], tuple[Any, int]]] = {
    "bytes": _bytes, "text": _text, "list": _list, "map": _map,
}  # fmt: skip
