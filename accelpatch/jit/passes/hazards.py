"""Hazards: pairs of instructions that the hardware does not interlock, and the wait states needed between them.

Sources: the sections on manually inserted wait states and on dependencies of matrix instructions in AMD's ISA guides of
CDNA 2, 3 and 4. Where a guide is ambiguous, the larger number is used.
"""

from __future__ import annotations

import re

from accelpatch.jit.passes.matrix import is_double, is_xdl, matrix_passes
from accelpatch.jit.passes.physical import EXEC, M0, SCALARS, VCC, VECTORS, Physical

_VALU = ("valu", "trans")
_MEMORY = ("buffer", "global", "flat", "scratch")
_LANES = re.compile(r"v_(readlane|writelane)_b32")
_DPP = re.compile(r"\b(quad_perm|row_\w+|wave_\w+)\b")
_HALF = re.compile(r"op_sel:\[[01,]*1\]|dst_sel:(BYTE|WORD)")
#: instructions that write half of a register without a modifier that says so
_HALVES = re.compile(r"v_(fma|mad)_mixhi|v_cvt_(pk|sr)_(fp8|bf8)|v_cvt_scalef32")
#: matrix passes -> wait states on gfx90a until a result can be read, other than as addend C
_READ_90A = {2: 5, 8: 11, 16: 19}
#: matrix passes -> wait states on gfx90a until a result can be read as C, if C overlaps it but is not identical
_ADDEND_90A = {2: 2, 8: 8, 16: 16}
#: matrix passes -> wait states on any arch until the C of an instruction can be overwritten
_OVERWRITE = {2: 1, 4: 3, 8: 7, 16: 15}


def wait_states(arch: str, first: Physical, second: Physical) -> int:
    """How many wait states are needed between an instruction and a later one."""
    need = _after_scalar_or_store(arch, first, second)
    if first.unit in _VALU:
        need = max(need, _after_vector(arch, first, second))
    if first.unit == "matrix":
        need = max(need, _after_matrix(arch, first, second))
    return need


def _after_scalar_or_store(arch: str, first: Physical, second: Physical) -> int:
    """After a scalar write of m0, after s_setreg, and after a store of more than 64 bits per lane."""
    need = 0
    if first.unit == "salu" and first.writes & second.reads & M0 and second.unit != "salu":
        need = 1
    if first.name.startswith("s_setreg") and second.name.startswith(("s_getreg", "s_setreg")):
        need = 2
    stored = max((operand for operand in first.operands if operand & VECTORS), key=int.bit_count, default=0)
    wide = first.unit in _MEMORY and "store" in first.instruction.form.flags and stored.bit_count() > 2
    if wide and second.unit in (*_VALU, "matrix") and second.writes & stored:
        need = max(need, 1 if arch == "gfx90a" else 2)
    return need


def _after_vector(arch: str, first: Physical, second: Physical) -> int:
    """After an instruction of the vector ALU."""
    scalars, vectors = first.writes & SCALARS, first.writes & VECTORS
    need = [0]
    if second.unit in _MEMORY and scalars & second.reads:
        need.append(5)
    if _DPP.search(second.instruction.mod) and second.unit in _VALU:
        need += [2] if vectors & second.reads else []
        need += [5] if scalars & EXEC else []
    if second.name.startswith("v_div_fmas") and scalars & VCC:
        need.append(4)
    if _LANES.match(second.name) and scalars & second.operands[2]:
        need.append(4)
    if second.unit == "matrix":
        need += [4] if scalars & EXEC else []
        need += [2] if vectors & second.reads and not first.name.startswith("v_dot") else []
    if first.name.startswith("v_dot") and second.unit not in ("salu", "control", "smem"):
        need.append(_after_dot(first, second))
    if arch != "gfx90a":
        need.append(_after_vector_94x(arch, first, second, vectors, scalars))
    return max(need)


def around_double(first: Physical, second: Physical) -> int:
    """Wait states on gfx90a between a vector ALU write and a memory read of it. They matter only in kernels with 64-bit
    matrix instructions: otherwise the hardware interlocks."""
    return 2 if first.unit in _VALU and second.unit in (*_MEMORY, "ds") and first.writes & second.reads & VECTORS else 0


def _after_vector_94x(arch: str, first: Physical, second: Physical, vectors: int, scalars: int) -> int:
    need = [0]
    if second.unit in _VALU:
        need += [1] if first.unit == "trans" and second.unit != "trans" and vectors & second.reads else []
        half = _HALF.search(first.instruction.mod) or _HALVES.match(first.name)
        need += [1] if half and vectors & second.reads else []
        need += [2] if scalars & second.reads else []
        if second.name.startswith(("v_readlane", "v_readfirstlane", "v_writelane")):
            need += [1] if vectors & second.operands[1] else []
            need += [4] if scalars & EXEC else []
        if re.match(r"v_permlane\d+_swap", second.name):
            need += [2] if vectors & second.reads else []
            need += [4] if scalars & EXEC else []
    return max(need)


def _after_dot(first: Physical, second: Physical) -> int:
    """After a dot product. The same dot product may use the result as its addend at once."""
    same, result = first.name == second.name, first.writes & VECTORS
    addend = second.operands[3] if same and len(second.operands) > 3 else second.operands[0] if same else 0
    factors = second.operands[1:3] if same else second.operands
    read = any(operand & result for operand in factors)
    return 3 if read or (result & second.writes and not same and not result & addend) else 0


def _after_matrix(arch: str, first: Physical, second: Physical) -> int:
    result = first.operands[0]
    if second.unit == "matrix":
        need = [_until_addend(arch, first, second)] if result & second.operands[3] else [0]
        if result & (second.operands[1] | second.operands[2]):
            need.append(_until_read(arch, first, memory=False))
        return max(need)
    if second.unit in ("salu", "control", "smem"):
        return 0
    need = [0]
    if result & (second.reads | second.writes):
        reads = bool(result & second.reads)
        need.append(_until_read(arch, first, memory=reads and second.unit not in _VALU))
    if is_double(first.name) and re.match(r"v_fmac?_f64", second.name):
        need.append(2)
    if first.operands[3] & second.writes and not is_double(first.name) and is_xdl(first.name, arch):
        need.append(_OVERWRITE[matrix_passes(first.name, arch)])
    return max(need)


def _until_read(arch: str, first: Physical, *, memory: bool) -> int:
    """Until the result of a matrix instruction can be read (other than as addend C), or overwritten. memory: whether a
    memory instruction reads it."""
    passes = matrix_passes(first.name, arch)
    if is_double(first.name):
        small = "_4x4x" in first.name
        return (9 if memory else 6) if small else (18 if memory else 11)
    if arch == "gfx90a":
        return _READ_90A[passes]
    return passes + (3 if is_xdl(first.name, arch) else 2) + _gfx950_extra(arch, first.name, passes)


def _gfx950_extra(arch: str, name: str, passes: int) -> int:
    return int(arch == "gfx950" and passes != 2 and is_xdl(name, arch))


def _until_addend(arch: str, first: Physical, second: Physical) -> int:
    """Until the result of a matrix instruction can be read as C: (nearly) at once, if C is exactly these registers, as
    when products are accumulated."""
    passes, double = matrix_passes(first.name, arch), is_double(first.name)
    if first.operands[0] == second.operands[3]:
        small = double and is_double(second.name) and "_4x4x" in first.name and "_4x4x" in second.name
        return 4 if small else 2 if arch != "gfx90a" and passes == 2 else 0
    if double:
        if is_xdl(second.name, arch):
            return 0
        return 4 if "_4x4x" in first.name else 9
    if arch == "gfx90a":
        return _ADDEND_90A[passes] + is_double(second.name)
    if is_xdl(second.name, arch) and not is_xdl(first.name, arch):
        return 0
    return passes + is_xdl(first.name, arch) + _gfx950_extra(arch, first.name, passes)
