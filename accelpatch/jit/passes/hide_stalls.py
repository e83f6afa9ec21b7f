"""A list scheduler: moves independent instructions to where the hardware would stall.

Only instructions between two fences are reordered: fences are control flow, waits, barriers, writes of the exec mask,
and instructions with effects outside of registers. Memory instructions keep their order. Where nothing would stall, the
kernel's order stays, which keeps live ranges short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from accelpatch.jit.ir import Instruction, Part, Program, special_regunits
from accelpatch.jit.passes.allocation import Allocation
from accelpatch.jit.passes.hazards import wait_states
from accelpatch.jit.passes.liveness import bits
from accelpatch.jit.passes.matrix import matrix_passes
from accelpatch.jit.passes.physical import BASE, Physical, physical

_EXEC = special_regunits("exec")
_MEMORY = ("smem", "ds", "flat", "global", "scratch", "buffer")
#: how many of the remaining instructions the scheduler considers at a time
WINDOW = 48
#: register file -> the most registers of a piece, see _pieces
_PIECE: Mapping[str, int] = {"s": 102, "v": 256}
#: execution unit -> cycles, of one instruction each, until a result can be used; for loads at least llvm-mca's figures
_LATENCY: Mapping[str, int] = {"smem": 20, "ds": 20, "flat": 80, "global": 80, "scratch": 80, "buffer": 80, "trans": 4}
_STATE = ("s_setreg", "s_getreg", "s_memtime", "s_memrealtime", "s_dcache", "s_getpc", "s_setpc", "s_swappc", "s_call",
          "s_rfe", "s_sendmsg", "s_cbranch")  # fmt: skip


def hide_stalls(program: Program) -> None:
    for block in program.blocks:
        made: list[Instruction] = []
        for run in _runs(block.instructions):
            for piece, allocation in _pieces(run):
                made += _scheduled(program.arch, piece, allocation)
        block.instructions = made


def _runs(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Runs of instructions between fences; each fence is a run by itself."""
    run: list[Instruction] = []
    for one in instructions:
        fence = one.form.unit == "control" or one.writes & _EXEC or one.name.startswith(_STATE)
        if run and (fence or one.region is not run[-1].region):
            yield run
            run = []
        if fence:
            yield [one]
        else:
            run.append(one)
    yield run


@dataclass(eq=False)
class DagNode:
    """An instruction to be scheduled. at: its index in the run. successors: the instructions that depend on it -> the
    latency in cycles. unscheduled: how many of its predecessors are not scheduled yet. earliest: the first cycle at
    which it does not stall."""

    at: int
    physical: Physical
    successors: dict[DagNode, int] = field(default_factory=dict)
    unscheduled: int = 0
    earliest: int = 0

    def precedes(self, other: DagNode, latency: int) -> None:
        if other is not self:
            other.unscheduled += other not in self.successors
            self.successors[other] = max(self.successors.get(other, 0), latency)


def _pieces(run: Sequence[Instruction]) -> Iterator[tuple[list[Instruction], Allocation]]:
    """A run in pieces, each with a provisional allocation in which no two virtual registers share a physical one: the
    rules on wait states, which compare physical registers, then find the true dependencies only. A piece ends where a
    register file is full."""
    piece: list[Instruction] = []
    allocation, used = Allocation(), dict.fromkeys(BASE, 0)
    for one in run:
        every = {operand.register for operand in one.operands if isinstance(operand, Part)}
        registers = every - allocation.first.keys()
        need = {file: used[file] + sum(each.dwords for each in registers if each.file == file) for file in BASE}
        if piece and any(need[file] > most for file, most in _PIECE.items()):
            yield piece, allocation
            piece, allocation, used = [], Allocation(), dict.fromkeys(BASE, 0)
            registers = every
        for each in sorted(registers, key=lambda register: register.first_regunit):
            allocation.first[each] = used[each.file]
            used[each.file] += each.dwords
        piece.append(one)
    yield piece, allocation


def _scheduled(arch: str, run: list[Instruction], allocation: Allocation) -> list[Instruction]:
    nodes = [DagNode(at, physical(one, allocation)) for at, one in enumerate(run)]
    _connect(arch, nodes)
    made: list[Instruction] = []
    remaining, cycle = nodes, 0
    while remaining:
        ready = [one for one in remaining[:WINDOW] if not one.unscheduled]
        chosen = min(ready, key=lambda one: (max(one.earliest, cycle), one.at))
        remaining.remove(chosen)
        cycle = max(chosen.earliest, cycle)
        for other, latency in chosen.successors.items():
            other.unscheduled -= 1
            other.earliest = max(other.earliest, cycle + latency)
        cycle += 1
        made.append(chosen.physical.instruction)
    return made


def _connect(arch: str, nodes: Sequence[DagNode]) -> None:
    """Add the edges of the dependency graph: read after write, write after read, write after write, and the order of
    memory instructions."""
    writer: dict[int, DagNode] = {}
    readers: dict[int, list[DagNode]] = {}
    memory: DagNode | None = None
    for node in nodes:
        one = node.physical.instruction
        for regunit in bits(one.reads):
            if regunit in writer:
                writer[regunit].precedes(node, _latency(arch, writer[regunit].physical, node.physical))
            readers.setdefault(regunit, []).append(node)
        for regunit in bits(one.writes):
            for reader in readers.pop(regunit, ()):
                reader.precedes(node, max(1, wait_states(arch, reader.physical, node.physical) + 1))
            if regunit in writer:
                writer[regunit].precedes(node, max(1, wait_states(arch, writer[regunit].physical, node.physical) + 1))
            writer[regunit] = node
            if one.reads >> regunit & 1:
                readers[regunit] = [node]
        if one.form.unit in _MEMORY:
            if memory is not None:
                memory.precedes(node, 1)
            memory = node


def _latency(arch: str, first: Physical, second: Physical) -> int:
    """Cycles until ``second`` can read what ``first`` wrote without a stall."""
    latency = _LATENCY.get(first.unit, 1)
    if first.unit == "matrix":
        latency = matrix_passes(first.name, arch)
    return max(latency, wait_states(arch, first, second) + 1)
