"""Linear scan: a physical register for every virtual one, in the order in which their live ranges begin.

Each instruction has two slots, one in which it reads and one in which it writes. The live range of each 32-bit part of
a register is a set of slots, kept as the bits of a Python integer. Two registers can share a place where their sets are
disjoint, so that one may lie in a hole of the other's live range. Nothing is spilled: what does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelpatch.errors import CompileError
from accelpatch.jit.ir import Instruction, Program, Register
from accelpatch.jit.passes.liveness import Flow, bits
from accelpatch.jit.types import FILES

SCALARS = 102
_ADDRESSED = 256  # vector registers, and accumulators, that an instruction can address
_FILE = 512  # vector registers and accumulators together that a SIMD has for a lane
#: results that must not lie where the operands are: they are written before all of these are read
_EARLY = ("v_mad_u64_u32", "v_mad_i64_i32", "v_qsad_pk_u16_u8", "v_mqsad_pk_u16_u8", "v_mqsad_u32_u8")


class RegistersRunOut(CompileError):
    """A register file has too few registers for what is alive at one time."""


@dataclass
class Places:
    """of: register -> its first place in its register file. used: how many places of each file are in use."""

    of: dict[Register, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=lambda: {"s": 0, "v": 0, "a": 0})


def vector_budget(threads: int) -> int:
    """Vector registers and accumulators of a lane, together, for a workgroup that must fit on a compute unit."""
    waves = -(-threads // 64)
    return _FILE // -(-waves // 4) // 8 * 8


def live_slots(program: Program, found: Flow, pending: Mapping[Instruction, int]) -> dict[int, int]:
    """Unit -> the slots in which it is alive; a load's target also until the load is waited for."""
    slots: dict[int, int] = {}
    last = sum(len(block.instructions) for block in program.blocks)
    for block in reversed(program.blocks):
        first = last - len(block.instructions)
        defined = _defined(block.instructions, found.defined_in[block])
        ends = dict.fromkeys(bits(found.live_out[block] & defined[-1]), 2 * last)
        for at in range(last - 1, first - 1, -1):
            one = block.instructions[at - first]
            before = defined[at - first]
            for unit in bits(one.writes):
                if unit in ends and (not found.kept[one] >> unit & 1 or not before >> unit & 1):
                    _add(slots, unit, 2 * at + 1, ends.pop(unit))
                elif unit not in ends:
                    _add(slots, unit, 2 * at + 1, 2 * at + 2)
            early = one.form.unit in ("matrix", "smem") or one.name in _EARLY
            for unit in bits(found.uses(one) & before):
                ends.setdefault(unit, 2 * at + (2 if early else 1))
            for unit in bits(pending[one]):
                _add(slots, unit, 2 * at, 2 * at + 2)
        for unit, end in ends.items():
            _add(slots, unit, 2 * first, end)
        last = first
    return slots


def _defined(instructions: Sequence[Instruction], start: int) -> list[int]:
    """The units that may have been written before each instruction, and after the last."""
    defined = [start]
    for one in instructions:
        defined.append(defined[-1] | one.writes)
    return defined


def _add(slots: dict[int, int], unit: int, start: int, end: int) -> None:
    slots[unit] = slots.get(unit, 0) | ((1 << end) - (1 << start))


def allocate(program: Program, found: Flow, pending: Mapping[Instruction, int]) -> Places:
    """Places for all registers that are used. Raises RegistersRunOut where a file has too few."""
    slots = live_slots(program, found, pending)
    return _allocated(program, slots)


def apart(program: Program, found: Flow, pending: Mapping[Instruction, int]) -> Places:
    """The same with a place of its own for every register, as if each were alive all the time."""
    slots = live_slots(program, found, pending)
    always = (1 << 2 * sum(len(block.instructions) for block in program.blocks)) - 1
    return _allocated(program, dict.fromkeys(slots, always))


def _allocated(program: Program, slots: Mapping[int, int]) -> Places:
    lives = {register: [slots.get(register.unit + at, 0) for at in range(register.dwords)]
             for register in program.registers}  # fmt: skip
    places = Places()
    budget = vector_budget(program.threads)
    _allocate_file(program, "s", SCALARS, lives, places)
    _allocate_file(program, "v", min(_ADDRESSED, budget), lives, places)
    vectors = max(4, -(-places.used["v"] // 4) * 4)
    _allocate_file(program, "a", min(_ADDRESSED, budget - vectors), lives, places)
    return places


def _allocate_file(
    program: Program, file: str, limit: int, lives: Mapping[Register, list[int]], places: Places
) -> None:
    wanted = [one for one in program.registers if one.file == file and any(lives[one])]
    order = sorted(wanted, key=lambda one: (one.fixed is None, _start(lives[one]), -one.dwords))
    made = _scan(order, limit, lives)
    if isinstance(made, Register):
        # Long live ranges may leave holes too short for an array; placing the largest registers first leaves fewer.
        again = _scan(sorted(wanted, key=lambda one: (one.fixed is None, -one.dwords)), limit, lives)
        made = _run_out(program, file, limit, made, lives) if isinstance(again, Register) else again
    places.of.update(made)
    places.used[file] = max((at + one.dwords for one, at in made.items()), default=0)


def _start(life: Sequence[int]) -> int:
    """The first slot of a live range."""
    return min((one & -one).bit_length() for one in life if one)


def _scan(order: Sequence[Register], limit: int, lives: Mapping[Register, list[int]]) -> dict[Register, int] | Register:
    """Register -> place, or the first register for which there is none."""
    taken, made = [0] * limit, {}
    for register in order:
        life, step = lives[register], register.alignment[0]
        tries = [register.fixed] if register.fixed is not None else range(0, limit - register.dwords + 1, step)
        for first in tries:
            if not any(taken[first + at] & one for at, one in enumerate(life)):
                break
        else:
            return register
        for at, one in enumerate(life):
            taken[first + at] |= one
        made[register] = first
    return made


def _run_out(
    program: Program, file: str, limit: int, failed: Register, lives: Mapping[Register, list[int]]
) -> dict[Register, int]:
    """Raise the error that names what is in registers at the instruction where most of them are in use."""
    mine = {one: life for one, life in lives.items() if one.file == file and any(life)}
    at, most = 0, -1
    for place, _ in enumerate(program.instructions()):
        in_use = sum(life >> slot & 1 for each in mine.values() for life in each for slot in (2 * place, 2 * place + 1))
        at, most = (place, in_use) if in_use > most else (at, most)
    holders: dict[tuple[str, str], int] = {}
    for one, each in mine.items():
        count = sum(bool(life >> (2 * at) & 3) for life in each)
        if count:
            key = one.name, str(one.line)
            holders[key] = holders.get(key, 0) + count
    line = list(program.instructions())[at].line
    in_use = sum(holders.values())
    names = ", ".join(f"{name} of {where} ({count})" for (name, where), count in
                      sorted(holders.items(), key=lambda item: -item[1])[:8])  # fmt: skip
    apart = "" if in_use > limit else " but not side by side, as an array must be"
    raise RegistersRunOut(
        f"{line}: {FILES[file]} registers run out: {in_use} are held here and {limit} are to be had{apart}, so that "
        f"{failed.name} of {failed.line} ({failed.dwords}) has none. They are held by {names}"
    )
