"""Instructions with sets of physical registers in place of virtual ones: the rules on hazards compare these."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.jit.ir import SPECIAL, Instruction, Operand, Part
from accelpatch.jit.passes.allocation import Allocation

#: register file -> the bit of its first register in a set of physical registers
BASE = {"s": 0, "v": 128, "a": 384}
#: name -> the bit of its first register in such a set, and how many there are; no hazard depends on scc
_HARDWARE_NUMBERS = {"vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1), "exec": (126, 2),
            "exec_lo": (126, 1), "exec_hi": (127, 1), "scc": (127, 0)}  # fmt: skip
SCALARS = (1 << 128) - 1
VECTORS = ~SCALARS


def special_mask(name: str) -> int:
    """The set of registers that a name such as vcc stands for."""
    first, many = _HARDWARE_NUMBERS[name]
    return ((1 << many) - 1) << first


VCC, EXEC, M0 = special_mask("vcc"), special_mask("exec"), special_mask("m0")


def mask(operand: Operand, allocation: Allocation) -> int:
    """The physical registers of an operand."""
    if isinstance(operand, Part):
        first = BASE[operand.register.file] + allocation.first.get(operand.register, 0) + operand.first
        return ((1 << operand.dwords) - 1) << first
    return special_mask(operand) if operand in SPECIAL else 0


@dataclass(eq=False)
class Physical:
    """An instruction, and the physical registers of each operand, of all that it reads, and of all that it writes."""

    instruction: Instruction
    operands: tuple[int, ...]
    reads: int
    writes: int

    @property
    def unit(self) -> str:
        return self.instruction.form.unit

    @property
    def name(self) -> str:
        return self.instruction.form.name


def physical(one: Instruction, allocation: Allocation) -> Physical:
    operands = tuple(mask(operand, allocation) for operand in one.operands)
    reads = writes = 0
    for name in one.form.reads:
        reads |= special_mask(name)
    for name in one.form.writes:
        writes |= special_mask(name)
    for registers, slot in zip(operands, one.form.operands, strict=True):
        reads |= registers if slot.reads else 0
        writes |= registers if slot.writes else 0
    return Physical(one, operands, reads, writes)
