"""Instructions that move values between lanes, and between lanes and scalar registers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from accelpatch.jit.emulate.integers import IntegerReader, read_integer, write_integer
from accelpatch.jit.emulate.operands import VGPR
from accelpatch.jit.emulate.registry import Decoding, Step, instruction
from accelpatch.jit.emulate.vector import row_of, vector
from accelpatch.jit.emulate.wave import Array, Wave

LANE = np.arange(64)
BELOW = [np.uint32((1 << min(lane, 32)) - 1) for lane in range(64)]
BELOW_HIGH = [np.uint32((1 << max(lane - 32, 0)) - 1) for lane in range(64)]


def count_below(below: list[np.uint32]) -> Callable[[Array, Array], Array]:
    """v_mbcnt: bits of a mask below the own lane, and more."""
    masks = np.array(below, np.uint32)

    def count(mask: Array, more: Array) -> Array:
        chosen = np.broadcast_to(mask, 64) & masks
        bits = np.unpackbits(chosen.view(np.uint8).reshape(64, 4), axis=1).sum(1).astype(np.uint32)
        return bits + more

    return count


vector("u32: u32 u32", {"v_mbcnt_lo_u32_b32": count_below(BELOW), "v_mbcnt_hi_u32_b32": count_below(BELOW_HIGH)})


def lane_number(d: Decoding) -> IntegerReader:
    """A lane's number from a scalar operand."""
    read = read_integer(d, d.operand())
    return lambda w: read(w) & 63


@instruction("v_readfirstlane_b32")
def read_first_lane(d: Decoding) -> Step:
    """The first lane of exec, and lane 0 where there is none."""
    store, source = write_integer(d, d.operand()), d.reading(d.operand(1))
    if not source.vector:
        raise d.line.fault(f"{source.text} is no vector register")
    row = source.register - VGPR
    return lambda w: store(w, int(w.u32[row, max((w.exec & -w.exec).bit_length() - 1, 0)]))


@instruction("v_readlane_b32")
def read_lane(d: Decoding) -> Step:
    """Whatever exec says; so the register counts as read in no lane of the mask."""
    store, row, lane = write_integer(d, d.operand()), row_of(d, d.operand(1)), lane_number(d)
    register, line = row + VGPR, d.line

    def execute(w: Wave) -> None:
        at = lane(w)
        if w.strict and not w.defined[register] >> at & 1:
            raise line.fault(f"wave {w.number} reads lane {at} of a register that nothing has written there")
        store(w, int(w.u32[row, at]))

    d.pending_reads.append(register)
    return execute


@instruction("v_writelane_b32")
def write_lane(d: Decoding) -> Step:
    row = row_of(d, d.operand(1))
    value, lane = read_integer(d, d.operand()), lane_number(d)
    d.pending_reads.append(row + VGPR)

    def execute(w: Wave) -> None:
        at = lane(w)
        w.u32[row, at] = value(w)
        w.defined[row + VGPR] |= 1 << at

    return execute


def permute(w: Wave, index: Array, value: Array) -> Array:
    """Of each lane the value of another; zero from lanes that exec leaves out."""
    return np.where(w.mask[index], value[index], np.uint32(0))


@instruction("ds_bpermute_b32")
def backward_permute(d: Decoding) -> Step:
    into = row_of(d, d.writing(d.operand(1)))
    address, source = row_of(d, d.reading(d.operand(1))), row_of(d, d.reading(d.operand(1)))
    offset, line, registers = np.uint32(d.number("offset")), d.line, tuple(d.writes)

    def execute(w: Wave) -> None:
        index = (w.u32[address] + offset >> np.uint32(2) & np.uint32(63)).astype(np.int64)
        np.copyto(w.u32[into], permute(w, index, w.u32[source]), where=w.mask)
        w.waits.add("lds", line, registers)

    return execute


@instruction("ds_permute_b32")
def forward_permute(d: Decoding) -> Step:
    """Each lane of exec pushes its value to another; of several the highest lane's stays."""
    into = row_of(d, d.writing(d.operand(1)))
    address, source = row_of(d, d.reading(d.operand(1))), row_of(d, d.reading(d.operand(1)))
    offset, line, registers = np.uint32(d.number("offset")), d.line, tuple(d.writes)

    def execute(w: Wave) -> None:
        index = (w.u32[address] + offset >> np.uint32(2) & np.uint32(63)).astype(np.int64)
        pushed = np.zeros(64, np.uint32)
        for lane in np.flatnonzero(w.mask):
            pushed[index[lane]] = w.u32[source, lane]
        np.copyto(w.u32[into], pushed, where=w.mask)
        w.waits.add("lds", line, registers)

    return execute


@instruction("ds_swizzle_b32")
def swizzle(d: Decoding) -> Step:
    into, source = row_of(d, d.writing(d.operand(1))), row_of(d, d.reading(d.operand(1)))
    index, line, registers = swizzled(d, d.modifier("offset") or "0"), d.line, tuple(d.writes)

    def execute(w: Wave) -> None:
        np.copyto(w.u32[into], permute(w, index, w.u32[source]), where=w.mask)
        w.waits.add("lds", line, registers)

    return execute


def swizzled(d: Decoding, text: str) -> Array:
    """Of each lane the lane that it reads, from the number or from swizzle(...)."""
    found = re.fullmatch(r"swizzle\((\w+)\s*,\s*(.*)\)", text)
    if found is None:
        code = int(text, 0)
        if code & 0x8000:
            return (LANE & ~3) + np.array([code >> 2 * at & 3 for at in range(4)])[LANE & 3]
        return _masked(code & 31, code >> 5 & 31, code >> 10 & 31)
    mode, words = found[1], [one.strip().strip('"') for one in found[2].split(",")]
    if mode == "QUAD_PERM":
        return (LANE & ~3) + np.array([int(one) for one in words])[LANE & 3]
    if mode == "SWAP":
        return LANE ^ int(words[0])
    if mode == "REVERSE":
        return LANE ^ (int(words[0]) - 1)
    if mode == "BROADCAST":
        return (LANE & ~(int(words[0]) - 1)) + int(words[1])
    if mode == "BITMASK_PERM":
        bits = words[0]
        chosen = [sum(1 << 4 - at for at, one in enumerate(bits) if one in kinds) for kinds in ("pi", "1", "i")]
        return _masked(*chosen)
    raise d.line.fault(f"the emulator does not know swizzle({mode}, ...)")


def _masked(keep: int, put: int, flip: int) -> Array:
    """Within 32 lanes: ((lane & keep) | put) ^ flip."""
    return (LANE & 32) + (((LANE & 31 & keep) | put) ^ flip)


def _swap(half: int) -> Callable[[Decoding], Step]:
    """gfx950: exchanges the upper part of the first register's rows of `half` lanes with the lower of the second's."""

    def build(d: Decoding) -> Step:
        a, b = (row_of(d, d.writing(d.reading(d.operand(1)))) for _ in range(2))
        for name in ("bound_ctrl", "fi"):
            d.flag(name)
        upper = LANE // half % 2 == 1

        def execute(w: Wave) -> None:
            x, y = w.u32[a].copy(), w.u32[b].copy()
            w.u32[a] = np.where(upper & w.mask, np.roll(y, half), x)
            w.u32[b] = np.where(~upper & w.mask, np.roll(x, -half), y)

        return execute

    return build


instruction("v_permlane16_swap_b32", "gfx950")(_swap(16))
instruction("v_permlane32_swap_b32", "gfx950")(_swap(32))


@instruction("v_swap_b32")
def swap(d: Decoding) -> Step:
    a, b = (row_of(d, d.writing(d.reading(d.operand(1)))) for _ in range(2))

    def execute(w: Wave) -> None:
        x = w.u32[a].copy()
        np.copyto(w.u32[a], w.u32[b], where=w.mask)
        np.copyto(w.u32[b], x, where=w.mask)

    return execute
