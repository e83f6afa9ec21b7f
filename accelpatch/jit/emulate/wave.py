"""The state of one wavefront: its registers as numpy arrays, its exec mask, and what its counters still wait for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelpatch.jit.emulate.operands import EXEC, REGISTERS, VGPR
from accelpatch.jit.emulate.waits import Waits

LANES = 64
ALL = (1 << LANES) - 1
Array = NDArray[Any]


@lru_cache(maxsize=1 << 14)
def lanes_of(bits: int) -> Array:
    """bool[64] of a 64-bit mask; read-only, since it is shared."""
    found = np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little").view(bool)
    found.flags.writeable = False
    return found


def bits_of(lanes: Array) -> int:
    """The 64-bit mask of bool[64]."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Wave:
    """A wavefront. number: in its workgroup. group: what the waves of the workgroup have in common (workgroup.py).

    u32[512, 64] holds the vector registers, and from row 256 on the accumulation registers; the other arrays are views
    of it by type, low16 and high16 of the halves. s: scalar registers. defined: of each vector register the mask of
    lanes that have been written; of each scalar register whether it has been. Without `strict`, registers hold `poison`
    before they are written and may be read.
    """

    def __init__(self, number: int, group: Any, strict: bool, poison: int) -> None:
        self.number, self.group, self.strict = number, group, strict
        self.u32 = np.full((REGISTERS - VGPR, LANES), poison, np.uint32)
        self.i32, self.f32 = self.u32.view(np.int32), self.u32.view(np.float32)
        halves = self.u32.view(np.uint16).reshape(REGISTERS - VGPR, LANES, 2)
        self.u16, self.high_u16 = halves[:, :, 0], halves[:, :, 1]
        self.s = [poison] * VGPR
        self.defined = [0] * REGISTERS
        self.scc = 0
        self.pc = 0
        self.steps = 0
        self.mode = 0xF0
        self.waits = Waits()
        self.private: Any = None  # private.py
        self.wait_states: Any = None  # wait_states.py; None where they are not checked
        self.set_exec(ALL)

    def set_exec(self, bits: int) -> None:
        self.s[EXEC], self.s[EXEC + 1] = bits & 0xFFFFFFFF, bits >> 32
        self.exec = bits
        self.full = bits == ALL
        self.mask = lanes_of(bits)

    def set_scalar(self, register: int, value: int) -> None:
        """Write a 32-bit scalar register, which may be half of exec."""
        self.s[register] = value
        if register >= EXEC:
            self.set_exec(self.s[EXEC] | self.s[EXEC + 1] << 32)

    def define(self, register: int, value: int) -> None:
        """Give a scalar register its value at the start."""
        self.s[register] = value
        self.defined[register] = ALL
