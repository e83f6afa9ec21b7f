"""Splits arrays of registers into pieces that can be allocated independently.

Registers of an array that one instruction has in a single operand must stay contiguous; others need not. A piece keeps
its register units, so that the reads and writes of instructions do not change.
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
    piece_of: dict[tuple[Register, int], tuple[Register, int]] = {}  # array and dword -> its piece and that one's start
    for register, used in parts.items():
        pieces = _pieces(used)
        if pieces != [(0, register.dwords)] and register.fixed is None:
            _split(program, register, pieces, used, piece_of)
    for one in program.instructions():
        _rename(one, piece_of)


def _pieces(used: list[Part]) -> list[tuple[int, int]]:
    """Each piece of an array as its first dword and the one after its last."""
    found: list[tuple[int, int]] = []
    for start, end in sorted({(one.first, one.first + one.dwords) for one in used}):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _split(
    program: Program, register: Register, pieces: list[tuple[int, int]], used: list[Part],
    piece_of: dict[tuple[Register, int], tuple[Register, int]],
) -> None:  # fmt: skip
    program.registers.remove(register)
    for start, end in pieces:
        piece = Register(register.file, end - start, register.first_regunit + start, register.line, register.name)
        wanted = [alignment(one.register.file, one.dwords) for one in used if start <= one.first < end]
        piece.alignment[0] = max(wanted)
        program.registers.append(piece)
        piece_of.update({(register, at): (piece, start) for at in range(start, end)})


def _rename(one: Instruction, piece_of: dict[tuple[Register, int], tuple[Register, int]]) -> None:
    operands: list[Operand] = []
    for operand in one.operands:
        if isinstance(operand, Part) and (operand.register, operand.first) in piece_of:
            piece, start = piece_of[operand.register, operand.first]
            operands.append(Part(piece, operand.first - start, operand.dwords, operand.sign))
        else:
            operands.append(operand)
    one.operands = tuple(operands)
