"""Instructions with their places in the register files: what the rules on hazards compare."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.jit.ir import HIDDEN, Instruction, Operand, Part
from accelpatch.jit.passes.allocation import Places

#: file -> the first bit of its places in a set
BASE = {"s": 0, "v": 128, "a": 384}
_SPECIAL = {"vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1), "exec": (126, 2),
            "exec_lo": (126, 1), "exec_hi": (127, 1), "scc": (127, 0)}  # fmt: skip
SCALARS = (1 << 128) - 1
VECTORS = ~SCALARS


def special(name: str) -> int:
    """The set of places that a name such as vcc stands for."""
    first, many = _SPECIAL[name]
    return ((1 << many) - 1) << first


VCC, EXEC, M0 = special("vcc"), special("exec"), special("m0")


def mask(operand: Operand, places: Places) -> int:
    """The places of an operand."""
    if isinstance(operand, Part):
        first = BASE[operand.register.file] + places.of.get(operand.register, 0) + operand.first
        return ((1 << operand.dwords) - 1) << first
    return special(operand) if operand in HIDDEN else 0


@dataclass(eq=False)
class Placed:
    """An instruction: the places of each operand, of all that it reads, of all that it writes."""

    one: Instruction
    operands: tuple[int, ...]
    reads: int
    writes: int

    @property
    def unit(self) -> str:
        return self.one.form.unit

    @property
    def name(self) -> str:
        return self.one.form.name


def placed(one: Instruction, places: Places) -> Placed:
    operands = tuple(mask(operand, places) for operand in one.operands)
    reads = writes = 0
    for name in one.form.reads:
        reads |= special(name)
    for name in one.form.writes:
        writes |= special(name)
    for registers, slot in zip(operands, one.form.operands, strict=True):
        reads |= registers if slot.reads else 0
        writes |= registers if slot.writes else 0
    return Placed(one, operands, reads, writes)
