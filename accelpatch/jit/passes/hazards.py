"""Pairs of instructions that the hardware does not keep apart: how many wait states must lie between them.

Sources: the sections on manually inserted wait states and on dependencies of matrix instructions in AMD's ISA guides of
CDNA 2, 3 and 4. Where a guide leaves room, the longer wait is taken.
"""

from __future__ import annotations

import re

from accelpatch.jit.passes.matrix import is_double, is_xdl, passes
from accelpatch.jit.passes.physical import EXEC, M0, SCALARS, VCC, VECTORS, Placed

_VALU = ("valu", "trans")
_MEMORY = ("buffer", "global", "flat", "scratch")
_LANES = re.compile(r"v_(readlane|writelane)_b32")
_DPP = re.compile(r"\b(quad_perm|row_\w+|wave_\w+)\b")
_HALF = re.compile(r"op_sel:\[[01,]*1\]|dst_sel:(BYTE|WORD)")
#: what writes a part of a register without a modifier that says so
_HALVES = re.compile(r"v_(fma|mad)_mixhi|v_cvt_(pk|sr)_(fp8|bf8)|v_cvt_scalef32")
#: passes -> wait states of gfx90a: to a result that is read as a factor, or by anything else; as an addend that is not
#: quite the same registers; until an addend may be overwritten
_READ_90A = {2: 5, 8: 11, 16: 19}
_ADDEND_90A = {2: 2, 8: 8, 16: 16}
_OVERWRITE = {2: 1, 4: 3, 8: 7, 16: 15}


def wait_states(arch: str, first: Placed, second: Placed) -> int:
    """How many wait states must lie between two instructions that follow each other; 0: none."""
    need = _scalar(arch, first, second)
    if first.unit in _VALU:
        need = max(need, _after_vector(arch, first, second))
    if first.unit == "matrix":
        need = max(need, _after_matrix(arch, first, second))
    return need


def _scalar(arch: str, first: Placed, second: Placed) -> int:
    need = 0
    if first.unit == "salu" and first.writes & second.reads & M0 and second.unit != "salu":
        need = 1
    if first.name.startswith("s_setreg") and second.name.startswith(("s_getreg", "s_setreg")):
        need = 2
    stored = max((operand for operand in first.operands if operand & VECTORS), key=int.bit_count, default=0)
    wide = first.unit in _MEMORY and "store" in first.one.form.flags and stored.bit_count() > 2
    if wide and second.unit in (*_VALU, "matrix") and second.writes & stored:
        need = max(need, 1 if arch == "gfx90a" else 2)
    return need


def _after_vector(arch: str, first: Placed, second: Placed) -> int:
    """After an instruction of the vector unit."""
    scalars, vectors = first.writes & SCALARS, first.writes & VECTORS
    need = [0]
    if second.unit in _MEMORY and scalars & second.reads:
        need.append(5)
    if _DPP.search(second.one.mod) and second.unit in _VALU:
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


def around_double(first: Placed, second: Placed) -> int:
    """On gfx90a what the hardware keeps apart by itself, unless a product of 64 bits stands between them."""
    return 2 if first.unit in _VALU and second.unit in (*_MEMORY, "ds") and first.writes & second.reads & VECTORS else 0


def _after_vector_94x(arch: str, first: Placed, second: Placed, vectors: int, scalars: int) -> int:
    need = [0]
    if second.unit in _VALU:
        need += [1] if first.unit == "trans" and second.unit != "trans" and vectors & second.reads else []
        half = _HALF.search(first.one.mod) or _HALVES.match(first.name)
        need += [1] if half and vectors & second.reads else []
        need += [2] if scalars & second.reads else []
        if second.name.startswith(("v_readlane", "v_readfirstlane", "v_writelane")):
            need += [1] if vectors & second.operands[1] else []
            need += [4] if scalars & EXEC else []
        if re.match(r"v_permlane\d+_swap", second.name):
            need += [2] if vectors & second.reads else []
            need += [4] if scalars & EXEC else []
    return max(need)


def _after_dot(first: Placed, second: Placed) -> int:
    """After a dot product."""
    same, result = first.name == second.name, first.writes & VECTORS
    addend = second.operands[3] if same and len(second.operands) > 3 else second.operands[0] if same else 0
    factors = second.operands[1:3] if same else second.operands
    read = any(operand & result for operand in factors)
    return 3 if read or (result & second.writes and not same and not result & addend) else 0


def _after_matrix(arch: str, first: Placed, second: Placed) -> int:
    result = first.operands[0]
    if second.unit == "matrix":
        need = [_addend(arch, first, second)] if result & second.operands[3] else [0]
        if result & (second.operands[1] | second.operands[2]):
            need.append(_read(arch, first, memory=False))
        return max(need)
    if second.unit in ("salu", "control", "smem"):
        return 0
    need = [0]
    if result & (second.reads | second.writes):
        reads = bool(result & second.reads)
        need.append(_read(arch, first, memory=reads and second.unit not in _VALU))
    if is_double(first.name) and re.match(r"v_fmac?_f64", second.name):
        need.append(2)
    if first.operands[3] & second.writes and not is_double(first.name) and is_xdl(first.name, arch):
        need.append(_OVERWRITE[passes(first.name, arch)])
    return max(need)


def _read(arch: str, first: Placed, *, memory: bool) -> int:
    """Until a result can be read, or overwritten, by what is no addend of a matrix instruction."""
    long = passes(first.name, arch)
    if is_double(first.name):
        small = "_4x4x" in first.name
        return (9 if memory else 6) if small else (18 if memory else 11)
    if arch == "gfx90a":
        return _READ_90A[long]
    return long + (3 if is_xdl(first.name, arch) else 2) + _more(arch, first.name, long)


def _more(arch: str, name: str, long: int) -> int:
    return int(arch == "gfx950" and long != 2 and is_xdl(name, arch))


def _addend(arch: str, first: Placed, second: Placed) -> int:
    """Until a result can be added to: at once if it is the very same registers, as in a chain of products."""
    long, double = passes(first.name, arch), is_double(first.name)
    if first.operands[0] == second.operands[3]:
        small = double and is_double(second.name) and "_4x4x" in first.name and "_4x4x" in second.name
        return 4 if small else 2 if arch != "gfx90a" and long == 2 else 0
    if double:
        if is_xdl(second.name, arch):
            return 0
        return 4 if "_4x4x" in first.name else 9
    if arch == "gfx90a":
        return _ADDEND_90A[long] + is_double(second.name)
    if is_xdl(second.name, arch) and not is_xdl(first.name, arch):
        return 0
    return long + is_xdl(first.name, arch) + _more(arch, first.name, long)
