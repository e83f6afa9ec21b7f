"""What a kernel finds when it starts: its arguments, the indices of its workgroup and work item, made when asked for.

The hardware puts the address of the arguments into s[0:1], the indices of the workgroup into s2 to s4 and those of the
work item, ten bits each, into v0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.ir import Block
from accelpatch.jit.registers import Value
from accelpatch.jit.types import Argument

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

FIXED_SCALARS = 5


def layout(arguments: tuple[Argument, ...]) -> tuple[list[int], int]:
    """Offset of each argument in the segment of arguments, and its size: each lies at a multiple of its own size."""
    offsets, end = [], 0
    for one in arguments:
        end = -(-end // one.bytes) * one.bytes
        offsets.append(end)
        end += one.bytes
    return offsets, end


class Prologue:
    """The code before the kernel's own."""

    def __init__(self, J: Builder):
        self.J, self.items, self._block, self._region = J, 0, Block("prologue"), J.region
        self._made: dict[str, Value] = {}
        self._packed = J.fixed("v", types.U32, "work item", 0)
        self._groups = [J.fixed("s", types.U32, f"blockIdx.{axis}", 2 + at) for at, axis in enumerate("xyz")]
        self._segment = J.fixed("s", types.U64, "arguments", 0)
        self.arguments = [J.named("s", one.type, one.name) for one in J.program.arguments]

    def group(self, axis: int) -> Value:
        return self._groups[axis]

    def item(self, axis: int) -> Value:
        """The index of the work item in its workgroup."""
        self.items = max(self.items, axis)
        made, there = self._named("v", f"threadIdx.{'xyz'[axis]}")
        if there:
            return made
        if axis:
            self._emit("v_bfe_u32", made, self._packed, 10 * axis, 10)
        else:
            self._emit("v_and_b32", made, 1023, self._packed)
        return made

    def lane(self) -> Value:
        """The lane in its wavefront."""
        made, there = self._named("v", "lane_id")
        if not there:
            self._emit("v_mbcnt_lo_u32_b32", made, -1, 0)
            self._emit("v_mbcnt_hi_u32_b32", made, -1, made)
        return made

    def wave(self) -> Value:
        """The wavefront in its workgroup, of a workgroup with one dimension."""
        item = self.item(0)
        made, there = self._named("s", "wave_id")
        if not there:
            self._emit("v_readfirstlane_b32", made, item)
            self._emit("s_lshr_b32", made, made, 6)
        return made

    def _named(self, file: str, name: str) -> tuple[Value, bool]:
        """A register that is made once, and whether it was there before."""
        there = name in self._made
        if not there:
            self._made[name] = self.J.named(file, types.U32, name)
        return self._made[name], there

    def _emit(self, name: str, *operands: Value | int | str) -> None:
        before = self.J.block, self.J.region
        self.J.block, self.J.region = self._block, self._region
        self.J.emit(name, *operands, own=True)
        self.J.block, self.J.region = before

    def finish(self) -> None:
        """Put it before the kernel: what is read of the arguments is loaded, and waited for."""
        program, entry = self.J.program, self.J.program.blocks[0]
        read = 0
        for one in (*self._block.instructions, *program.instructions()):
            read |= one.reads
        rest, self._block = self._block, Block("prologue")
        offsets, _ = layout(program.arguments)
        used = [(value, at) for value, at in zip(self.arguments, offsets, strict=True) if value.part.mask & read]
        for value, at in used:
            self._emit("s_load_dword" if value.dwords == 1 else "s_load_dwordx2", value, self._segment, at)
        if used:
            self._emit("s_waitcnt", "lgkmcnt(0)")
        entry.instructions[:0] = [*self._block.instructions[:-1], *rest.instructions, *self._block.instructions[-1:]]


class Index:
    """``x``, ``y`` and ``z``."""

    def __init__(self, of: str, prologue: Prologue):
        self._made = prologue.group if of == "block" else prologue.item

    @property
    def x(self) -> Value:
        return self._made(0)

    @property
    def y(self) -> Value:
        return self._made(1)

    @property
    def z(self) -> Value:
        return self._made(2)
