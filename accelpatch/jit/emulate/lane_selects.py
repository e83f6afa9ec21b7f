"""Parts of registers and of lanes: SDWA (bytes and words of operands) and DPP (a source taken from other lanes)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from accelpatch.jit.emulate.operands import Operand
from accelpatch.jit.emulate.registry import Decoding
from accelpatch.jit.emulate.wave import Array, Wave

Reader = Callable[[Wave], Array]
Writer = Callable[[Wave, Array], None]
SELECTS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
           "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8)}  # fmt: skip
LANE = np.arange(64)
ROW, IN_ROW = LANE & ~15, LANE & 15


def is_dpp(d: Decoding) -> bool:
    return any(name in PATTERNS for name in d.modifiers)


def source_select(d: Decoding, operand: Operand, source: int, made: Reader) -> Reader:
    """A source's reader with what SDWA or DPP select of it."""
    if source == 0 and is_dpp(d):
        return _from_lanes(d, made)
    if source not in (0, 1) or (name := d.modifier(f"src{source}_sel")) is None:
        return made
    shift, bits = _select(d, name)
    unread = np.uint32((1 << bits) - 1)
    top = np.uint32(1 << (bits - 1)) if operand.extended else np.uint32(0)

    def chosen(w: Wave) -> Array:
        word = made(w) >> np.uint32(shift) & unread
        return (word ^ top) - top if operand.extended else word

    return chosen


def _select(d: Decoding, name: str) -> tuple[int, int]:
    if name not in SELECTS:
        raise d.line.fault(f"{name} selects nothing; {', '.join(SELECTS)} do")
    return SELECTS[name]


def destination_select(d: Decoding, store: Writer, load: Reader) -> Writer:
    """The writer of a whole register, or what SDWA or DPP leave of it. load: reads the register as it was."""
    if is_dpp(d):
        return _to_lanes(d, store)
    name, unused = d.modifier("dst_sel"), d.modifier("dst_unused")
    if name is None:
        return store
    shift, bits = _select(d, name)
    mask, place = np.uint32((1 << bits) - 1), np.uint32(shift)
    kept = np.uint32(~((1 << bits) - 1 << shift) & 0xFFFFFFFF)

    def part(w: Wave, value: Array) -> None:
        word = (value & mask) << place
        if unused == "UNUSED_PRESERVE":
            word = word | load(w) & kept
        elif unused == "UNUSED_SEXT":
            left = np.int32(32 - shift - bits)
            word = (word.view(np.int32) << left >> left).view(np.uint32)
        store(w, word)

    return part


def _bounded(index: Array, valid: Array) -> tuple[Array, Array]:
    return np.where(valid, index, LANE), valid


def _shift(by: int) -> tuple[Array, Array]:
    return _bounded(LANE + by, (IN_ROW + by >= 0) & (IN_ROW + by < 16))


def _broadcast(by: int) -> tuple[Array, Array]:
    if by == 15:
        return _bounded(ROW - 1, ROW > 0)
    return _bounded(np.full(64, 31), LANE >= 32)


EVERY = np.ones(64, bool)
#: name -> of a lane the lane that it reads, and whether there is one
PATTERNS: dict[str, Callable[[str], tuple[Array, Array]]] = {
    "quad_perm": lambda v: ((LANE & ~3) + np.array([int(one) for one in v.strip("[]").split(",")])[LANE & 3], EVERY),
    "row_shl": lambda v: _shift(int(v)),
    "row_shr": lambda v: _shift(-int(v)),
    "row_ror": lambda v: (ROW + (IN_ROW - int(v)) % 16, EVERY),
    "row_mirror": lambda v: (ROW + 15 - IN_ROW, EVERY),
    "row_half_mirror": lambda v: ((LANE & ~7) + 7 - (LANE & 7), EVERY),
    "row_bcast": lambda v: _broadcast(int(v)),
    "row_newbcast": lambda v: (ROW + int(v), EVERY),
    "wave_shl": lambda v: _bounded(LANE + 1, LANE < 63),
    "wave_rol": lambda v: ((LANE + 1) % 64, EVERY),
    "wave_shr": lambda v: _bounded(LANE - 1, LANE > 0),
    "wave_ror": lambda v: ((LANE - 1) % 64, EVERY),
}


def _pattern(d: Decoding) -> tuple[Array, Array, bool]:
    """Of each lane its source lane, whether there is one, and whether a missing one reads as zero."""
    name = next(one for one in PATTERNS if one in d.modifiers)
    index, valid = PATTERNS[name](d.modifier(name) or "0")
    return index, valid, d.flag("bound_ctrl")


def _from_lanes(d: Decoding, made: Reader) -> Reader:
    index, valid, _ = _pattern(d)
    d.dpp = True

    def read(w: Wave) -> Array:
        value = made(w)[index]
        value[~(valid & w.mask[index])] = 0
        return value

    return read


def _to_lanes(d: Decoding, store: Writer) -> Writer:
    """Lanes outside the row and bank masks, and those without a source lane unless bound_ctrl, keep what they had."""
    index, valid, zero = _pattern(d)
    rows, banks = d.number("row_mask", 15), d.number("bank_mask", 15)
    chosen = (rows >> LANE // 16 & 1).astype(bool) & (banks >> (LANE // 4 & 3) & 1).astype(bool)

    def write(w: Wave, value: Array) -> None:
        mask, full = w.mask, w.full
        w.mask = mask & chosen if zero else mask & chosen & valid & mask[index]
        w.full = False
        store(w, value)
        w.mask, w.full = mask, full

    return write
