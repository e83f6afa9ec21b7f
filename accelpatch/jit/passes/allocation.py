"""Linear scan register allocation: a physical register for every virtual one, in the order in which live ranges begin.

Each instruction has two program points, one at which it reads and one at which it writes. The live range of a register
unit is the set of points at which it is live, kept as the bits of a Python integer. Two virtual registers can share a
physical one if their ranges are disjoint, so that one may lie in a hole of the other's range. Nothing is spilled: what
does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelpatch.errors import CompileError
from accelpatch.jit.ir import Instruction, Program, Register
from accelpatch.jit.passes.liveness import Dataflow, bits
from accelpatch.jit.types import FILES

SCALARS = 102
_ADDRESSED = 256  # vector registers, and as many accumulators, that an instruction can address
_FILE = 512  # vector registers and accumulators together that a SIMD has per lane
#: results that must not share a register with an operand: they are written before all operands are read
_EARLY_CLOBBER = ("v_mad_u64_u32", "v_mad_i64_i32", "v_qsad_pk_u16_u8", "v_mqsad_pk_u16_u8", "v_mqsad_u32_u8")


class OutOfRegisters(CompileError):
    """A register file has fewer registers than are live at one time."""


@dataclass
class Allocation:
    """first: virtual register -> the number of its first physical register. used: file -> how many registers of it are
    in use."""

    first: dict[Register, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=lambda: {"s": 0, "v": 0, "a": 0})


def vector_budget(threads: int) -> int:
    """Vector registers and accumulators of a lane, together, for a workgroup that must fit on a compute unit."""
    waves = -(-threads // 64)
    return _FILE // -(-waves // 4) // 8 * 8


def live_ranges(program: Program, flow: Dataflow, pending: Mapping[Instruction, int]) -> dict[int, int]:
    """Register unit -> its live range. The target of a load is live until a wait covers the load, even if nothing reads
    it. pending: instruction -> register units that outstanding loads will write."""
    ranges: dict[int, int] = {}
    last = sum(len(block.instructions) for block in program.blocks)
    for block in reversed(program.blocks):
        first = last - len(block.instructions)
        defined = _defined(block.instructions, flow.defined_in[block])
        ends = dict.fromkeys(bits(flow.live_out[block] & defined[-1]), 2 * last)
        for at in range(last - 1, first - 1, -1):
            one = block.instructions[at - first]
            before = defined[at - first]
            for regunit in bits(one.writes):
                if regunit in ends and (not flow.partial[one] >> regunit & 1 or not before >> regunit & 1):
                    _add(ranges, regunit, 2 * at + 1, ends.pop(regunit))
                elif regunit not in ends:
                    _add(ranges, regunit, 2 * at + 1, 2 * at + 2)
            early_clobber = one.form.unit in ("matrix", "smem") or one.name in _EARLY_CLOBBER
            for regunit in bits(flow.uses(one) & before):
                ends.setdefault(regunit, 2 * at + (2 if early_clobber else 1))
            for regunit in bits(pending[one]):
                _add(ranges, regunit, 2 * at, 2 * at + 2)
        for regunit, end in ends.items():
            _add(ranges, regunit, 2 * first, end)
        last = first
    return ranges


def _defined(instructions: Sequence[Instruction], start: int) -> list[int]:
    """The register units that may have been written before each instruction, and after the last."""
    defined = [start]
    for one in instructions:
        defined.append(defined[-1] | one.writes)
    return defined


def _add(ranges: dict[int, int], regunit: int, start: int, end: int) -> None:
    ranges[regunit] = ranges.get(regunit, 0) | ((1 << end) - (1 << start))


def allocate(program: Program, flow: Dataflow, pending: Mapping[Instruction, int]) -> Allocation:
    """Allocate all registers that are used. Raises OutOfRegisters where a file has too few."""
    return _allocated(program, live_ranges(program, flow, pending))


def allocate_without_sharing(program: Program, flow: Dataflow, pending: Mapping[Instruction, int]) -> Allocation:
    """The same without two virtual registers in one physical register, as if each were live everywhere."""
    ranges = live_ranges(program, flow, pending)
    everywhere = (1 << 2 * sum(len(block.instructions) for block in program.blocks)) - 1
    return _allocated(program, dict.fromkeys(ranges, everywhere))


def _allocated(program: Program, ranges: Mapping[int, int]) -> Allocation:
    lives = {register: [ranges.get(register.first_regunit + at, 0) for at in range(register.dwords)]
             for register in program.registers}  # fmt: skip
    allocation = Allocation()
    budget = vector_budget(program.threads)
    _allocate_file(program, "s", SCALARS, lives, allocation)
    _allocate_file(program, "v", min(_ADDRESSED, budget), lives, allocation)
    vectors = max(4, -(-allocation.used["v"] // 4) * 4)
    _allocate_file(program, "a", min(_ADDRESSED, budget - vectors), lives, allocation)
    return allocation


def _allocate_file(
    program: Program, file: str, limit: int, lives: Mapping[Register, list[int]], allocation: Allocation
) -> None:
    wanted = [one for one in program.registers if one.file == file and any(lives[one])]
    order = sorted(wanted, key=lambda one: (one.fixed is None, _start(lives[one]), -one.dwords))
    made = _scan(order, limit, lives)
    if isinstance(made, Register):
        # The free registers may be too scattered for an array: a second try allocates the largest arrays first.
        again = _scan(sorted(wanted, key=lambda one: (one.fixed is None, -one.dwords)), limit, lives)
        made = _run_out(program, file, limit, made, lives) if isinstance(again, Register) else again
    allocation.first.update(made)
    allocation.used[file] = max((at + one.dwords for one, at in made.items()), default=0)


def _start(life: Sequence[int]) -> int:
    """The first program point of a live range."""
    return min((one & -one).bit_length() for one in life if one)


def _scan(order: Sequence[Register], limit: int, lives: Mapping[Register, list[int]]) -> dict[Register, int] | Register:
    """Virtual register -> its first physical register, or the first virtual register that does not fit."""
    occupied, made = [0] * limit, {}
    for register in order:
        life, step = lives[register], register.alignment[0]
        tries = [register.fixed] if register.fixed is not None else range(0, limit - register.dwords + 1, step)
        for first in tries:
            if not any(occupied[first + at] & one for at, one in enumerate(life)):
                break
        else:
            return register
        for at, one in enumerate(life):
            occupied[first + at] |= one
        made[register] = first
    return made


def _run_out(
    program: Program, file: str, limit: int, failed: Register, lives: Mapping[Register, list[int]]
) -> dict[Register, int]:
    """Raise OutOfRegisters, which lists what is live at the instruction with the most live registers."""
    of_file = {one: life for one, life in lives.items() if one.file == file and any(life)}
    at, most = 0, -1
    for index, _ in enumerate(program.instructions()):
        live = sum(life >> point & 1 for each in of_file.values() for life in each
                   for point in (2 * index, 2 * index + 1))  # fmt: skip
        at, most = (index, live) if live > most else (at, most)
    holders: dict[tuple[str, str], int] = {}
    for one, each in of_file.items():
        count = sum(bool(life >> (2 * at) & 3) for life in each)
        if count:
            key = one.name, str(one.line)
            holders[key] = holders.get(key, 0) + count
    line = list(program.instructions())[at].line
    live = sum(holders.values())
    names = ", ".join(f"{name} of {where} ({count})" for (name, where), count in
                      sorted(holders.items(), key=lambda item: -item[1])[:8])  # fmt: skip
    scattered = "" if live > limit else ", but not side by side, as an array must be"
    raise OutOfRegisters(
        f"{line}: {FILES[file]} registers run out: {live} are live here and {limit} are available{scattered}, so that "
        f"{failed.name} of {failed.line} ({failed.dwords}) has none. Live are {names}"
    )
