"""The prologue of a kernel: loads its arguments, and computes the thread index, lane and wavefront where they are used.

The hardware puts the address of the kernarg segment, which holds the arguments, into s[0:1], the index of the workgroup
into s2 to s4, and that of the thread in its workgroup, ten bits per dimension, into v0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.ir import Block
from accelpatch.jit.registers import Value
from accelpatch.jit.types import Argument

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

FIXED_SCALARS = 5  # that the hardware fills


def kernarg_layout(arguments: tuple[Argument, ...]) -> tuple[list[int], int]:
    """The offset of each argument in the kernarg segment, where it is aligned to its own size; and the segment's
    size."""
    offsets, end = [], 0
    for one in arguments:
        end = -(-end // one.bytes) * one.bytes
        offsets.append(end)
        end += one.bytes
    return offsets, end


class Prologue:
    """The code that the jit puts before the kernel's own. dimension: the highest one of threadIdx that is used."""

    def __init__(self, J: Builder):
        self.J, self.dimension, self._block, self._region = J, 0, Block("prologue"), J.region
        self._registers: dict[str, Value] = {}
        self._packed = J.fixed("v", types.U32, "work item", 0)
        self._workgroup_ids = [J.fixed("s", types.U32, f"blockIdx.{axis}", 2 + at) for at, axis in enumerate("xyz")]
        self._kernarg = J.fixed("s", types.U64, "arguments", 0)
        self.arguments = [J.named("s", one.type, one.name) for one in J.program.arguments]

    def workgroup(self, axis: int) -> Value:
        return self._workgroup_ids[axis]

    def thread(self, axis: int) -> Value:
        """The index of the thread in its workgroup."""
        self.dimension = max(self.dimension, axis)
        made, known = self._once("v", f"threadIdx.{'xyz'[axis]}")
        if known:
            return made
        if axis:
            self._emit("v_bfe_u32", made, self._packed, 10 * axis, 10)
        else:
            self._emit("v_and_b32", made, 1023, self._packed)
        return made

    def lane(self) -> Value:
        """The thread's lane in its wavefront."""
        made, known = self._once("v", "lane_id")
        if not known:
            self._emit("v_mbcnt_lo_u32_b32", made, -1, 0)
            self._emit("v_mbcnt_hi_u32_b32", made, -1, made)
        return made

    def wave(self) -> Value:
        """The index of the wavefront in a workgroup with one dimension."""
        thread = self.thread(0)
        made, known = self._once("s", "wave_id")
        if not known:
            self._emit("v_readfirstlane_b32", made, thread)
            self._emit("s_lshr_b32", made, made, 6)
        return made

    def _once(self, file: str, name: str) -> tuple[Value, bool]:
        """The register of a name, which is made on first use, and whether it existed before."""
        known = name in self._registers
        if not known:
            self._registers[name] = self.J.named(file, types.U32, name)
        return self._registers[name], known

    def _emit(self, name: str, *operands: Value | int | str) -> None:
        before = self.J.block, self.J.region
        self.J.block, self.J.region = self._block, self._region
        self.J.emit(name, *operands, in_prologue=True)
        self.J.block, self.J.region = before

    def finish(self) -> None:
        """Put the prologue before the kernel: loads of the arguments that are read, the index computations, and the
        wait for the loads."""
        program, entry = self.J.program, self.J.program.blocks[0]
        read = 0
        for one in (*self._block.instructions, *program.instructions()):
            read |= one.reads
        rest, self._block = self._block, Block("prologue")
        offsets, _ = kernarg_layout(program.arguments)
        used = [(value, at) for value, at in zip(self.arguments, offsets, strict=True) if value.part.mask & read]
        for value, at in used:
            self._emit("s_load_dword" if value.dwords == 1 else "s_load_dwordx2", value, self._kernarg, at)
        if used:
            self._emit("s_waitcnt", "lgkmcnt(0)")
        entry.instructions[:0] = [*self._block.instructions[:-1], *rest.instructions, *self._block.instructions[-1:]]


class Index:
    """``J.blockIdx`` or ``J.threadIdx``, with ``x``, ``y`` and ``z``."""

    def __init__(self, of: str, prologue: Prologue):
        self._get = prologue.workgroup if of == "block" else prologue.thread

    @property
    def x(self) -> Value:
        return self._get(0)

    @property
    def y(self) -> Value:
        return self._get(1)

    @property
    def z(self) -> Value:
        return self._get(2)
