"""What loads and stores of vector registers have in common: the names' endings, and bytes to and from registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accelpatch.jit.emulate.memory import OutOfBounds
from accelpatch.jit.emulate.registry import Decoding
from accelpatch.jit.emulate.wave import Array, Wave


@dataclass(frozen=True)
class Form:
    """Of an access. bytes: in memory. words: of registers. d16: "low" or "high" half of one, the other kept."""

    bytes: int
    words: int = 1
    signed: bool = False
    d16: str = ""


LOADS = {
    "ubyte": Form(1), "sbyte": Form(1, signed=True), "ushort": Form(2), "sshort": Form(2, signed=True),
    "ubyte_d16": Form(1, d16="low"), "ubyte_d16_hi": Form(1, d16="high"),
    "sbyte_d16": Form(1, signed=True, d16="low"), "sbyte_d16_hi": Form(1, signed=True, d16="high"),
    "short_d16": Form(2, d16="low"), "short_d16_hi": Form(2, d16="high"),
    "dword": Form(4), "dwordx2": Form(8, 2), "dwordx3": Form(12, 3), "dwordx4": Form(16, 4),
}  # fmt: skip
STORES = {
    "byte": Form(1), "short": Form(2), "byte_d16_hi": Form(1, d16="high"), "short_d16_hi": Form(2, d16="high"),
    "dword": Form(4), "dwordx2": Form(8, 2), "dwordx3": Form(12, 3), "dwordx4": Form(16, 4),
}  # fmt: skip


def put(w: Wave, row: int, form: Form, data: Array, lanes: Array) -> None:
    """Loaded uint8[n, bytes] of `lanes` (bool[64], n of them set) into the registers from `row` on."""
    if form.bytes >= 4:
        words = data.view(np.uint32)
        for at in range(form.words):
            w.u32[row + at, lanes] = words[:, at]
        return
    kind = {1: np.int8 if form.signed else np.uint8, 2: np.int16 if form.signed else np.uint16}[form.bytes]
    value = data.view(kind)[:, 0]
    if form.d16:
        (w.u16 if form.d16 == "low" else w.high_u16)[row, lanes] = value.astype(np.int16).view(np.uint16)
    else:
        w.i32[row, lanes] = value.astype(np.int32)


def get(w: Wave, row: int, form: Form, lanes: Array) -> Array:
    """uint8[n, bytes] to be stored, of the lanes that are set."""
    if form.bytes >= 4:
        return np.ascontiguousarray(w.u32[row : row + form.words, lanes].T).view(np.uint8)
    word = w.u32[row, lanes] >> np.uint32(16 if form.d16 == "high" else 0)
    return np.ascontiguousarray(word).view(np.uint8).reshape(-1, 4)[:, : form.bytes]


def lane_of(lanes: Array, at: int) -> int:
    return int(np.flatnonzero(lanes)[at])


def checked(d: Decoding, size: int) -> Callable[[Wave, Array, Array, bool], None]:
    """A check of addresses (uint64, of the lanes that are set) for alignment to the access, or to words.

    Loads and stores across words are right on the hardware in the mode that the driver sets, but slow; atomics fault.
    """
    unit = np.uint64(min(size, 4) - 1)

    def check(w: Wave, addresses: Array, lanes: Array, atomic: bool) -> None:
        if w.group.misaligned and not atomic:
            return
        wrong = addresses & (np.uint64(size - 1) if atomic else unit)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise d.line.fault(
                f"lane {lane_of(lanes, at)} of wave {w.number}: the address {int(addresses[at]):#x} is misaligned: it "
                f"must be a multiple of {size if atomic else int(unit) + 1} bytes"
            )

    return check


def out_of_bounds(d: Decoding, w: Wave, addresses: Array, lanes: Array, error: OutOfBounds) -> Exception:
    lane, address = lane_of(lanes, error.at), int(addresses[error.at])
    what = f"stores to {error.words}, which is read-only" if error.read_only else "is out of bounds"
    more = "" if error.read_only else f": {error.words}"
    return d.line.fault(
        f"lane {lane} of wave {w.number}, workgroup {w.group.number}: the address {address:#x} {what}{more}"
    )
