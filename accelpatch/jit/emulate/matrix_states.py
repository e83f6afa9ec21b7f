"""Wait states after matrix instructions, by how many passes they take."""

from __future__ import annotations

import re
from dataclasses import dataclass

from accelpatch.jit.emulate.assembly import Line
from accelpatch.jit.emulate.operands import Operand


@dataclass(frozen=True)
class Matrix:
    """passes: of four cycles. double: of f64. fast: not of f32 or f64 (XDL). Registers, as ranges."""

    passes: int
    double: bool
    fast: bool
    result: range
    a: range
    b: range
    c: range


def registers(operand: Operand) -> range:
    return range(operand.register, operand.register + operand.count) if operand.kind == "register" else range(0)


def matrix_of(line: Line, arch: str) -> Matrix | None:
    found = re.fullmatch(r"v_mfma_(\w\d\d)_(\d+)x\d+x(\d+)_?(?:\d+b_)?(\w+)", line.mnemonic)
    if found is None or len(line.operands) != 4:
        return None
    result, m, k, kind = found[1], int(found[2]), int(found[3]), found[4]
    double = result == "f64"
    narrow = kind != "f32" and not double
    if double:
        passes = 4 if m == 4 else 8
    elif arch == "gfx90a" or m == 4 or not narrow:
        passes = {4: 2, 16: 8, 32: 16}[m]
    else:  # later archs take half as long for those of one block
        one_block = k >= (8 if m == 16 else 4) and (m == 16 or k >= 8 or kind == "xf32")
        passes = {16: 8, 32: 16}[m] // (2 if one_block else 1)
    if arch == "gfx950" and narrow and (m, k) in ((16, 128), (32, 64)):
        passes *= 2
    ranges = [registers(one) for one in line.operands]
    return Matrix(passes, double, narrow, *ranges)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def until_read(arch: str, before: Matrix) -> int:
    """Until a result can be read as A or B, by a vector instruction, or (but for f64) by memory."""
    if before.double:
        return 6 if before.passes == 4 else 11
    if arch == "gfx90a":
        return before.passes + 3
    return before.passes + (3 if before.fast else 2) + (arch == "gfx950" and before.fast and before.passes != 2)


def between_matrices(arch: str, before: Matrix, after: Matrix) -> tuple[int, str]:
    states, why = 0, ""
    if overlap(before.result, after.a) or overlap(before.result, after.b):
        states, why = until_read(arch, before), "reading a matrix result as A or B"
    if overlap(before.result, after.c):
        needed = as_addend(arch, before, after)
        if needed > states:
            states, why = needed, "reading a matrix result as C"
    return states, why


def as_addend(arch: str, before: Matrix, after: Matrix) -> int:
    if arch == "gfx90a" and before.double and not after.double:
        return 0
    if before.result == after.c:
        if before.double and after.double and before.passes == after.passes == 4:
            return 4
        return 2 if arch != "gfx90a" and before.passes == 2 else 0
    if before.double:
        return 0 if after.fast else 4 if before.passes == 4 else 9
    if arch == "gfx90a":
        return before.passes + after.double
    if after.fast and not before.fast:
        return 0
    return before.passes + before.fast + (arch == "gfx950" and before.fast and before.passes != 2)


def other_after_matrix(
    arch: str, before: Matrix, vector: bool, reads: tuple[int, ...], writes: tuple[int, ...]
) -> tuple[int, str]:
    if any(one in before.result for one in reads):
        if before.double and not vector:
            return (9 if before.passes == 4 else 18), "reading a matrix result by memory"
        return until_read(arch, before), "reading a matrix result"
    if any(one in before.result for one in writes):
        return until_read(arch, before), "overwriting a matrix result"
    if any(one in before.c for one in writes) and not before.double:
        return before.passes - 1, "overwriting the addend of a matrix product"
    return 0, ""
