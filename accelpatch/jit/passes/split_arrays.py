"""Splits arrays of registers into the parts that instructions use as one, so that each finds a place for itself.

Where an instruction names several registers of an array they stay side by side; what no instruction holds together
need not. The units of a part are the same before and after, so that nothing else of the program changes.
"""

from __future__ import annotations

from accelpatch.jit.instructions import alignment
from accelpatch.jit.ir import Instruction, Operand, Part, Program, Register


def split_arrays(program: Program) -> None:
    parts: dict[Register, list[Part]] = {}
    for one in program.instructions():
        for operand in one.operands:
            if isinstance(operand, Part):
                parts.setdefault(operand.register, []).append(operand)
    made: dict[tuple[Register, int], tuple[Register, int]] = {}
    for register, used in parts.items():
        pieces = _pieces(used)
        if pieces != [(0, register.dwords)] and register.fixed is None:
            _split(program, register, pieces, used, made)
    for one in program.instructions():
        _rename(one, made)


def _pieces(used: list[Part]) -> list[tuple[int, int]]:
    """First dword of each piece of an array, and the first one after it."""
    found: list[tuple[int, int]] = []
    for start, end in sorted({(one.first, one.first + one.dwords) for one in used}):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _split(
    program: Program, register: Register, pieces: list[tuple[int, int]], used: list[Part],
    made: dict[tuple[Register, int], tuple[Register, int]],
) -> None:  # fmt: skip
    program.registers.remove(register)
    for start, end in pieces:
        piece = Register(register.file, end - start, register.unit + start, register.line, register.name)
        wanted = [alignment(one.register.file, one.dwords) for one in used if start <= one.first < end]
        piece.alignment[0] = max(wanted)
        program.registers.append(piece)
        made.update({(register, at): (piece, start) for at in range(start, end)})


def _rename(one: Instruction, made: dict[tuple[Register, int], tuple[Register, int]]) -> None:
    operands: list[Operand] = []
    for operand in one.operands:
        if isinstance(operand, Part) and (operand.register, operand.first) in made:
            piece, start = made[operand.register, operand.first]
            operands.append(Part(piece, operand.first - start, operand.dwords, operand.sign))
        else:
            operands.append(operand)
    one.operands = tuple(operands)
