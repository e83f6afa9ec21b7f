"""Conversions between types of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.expressions import Constant, Convert, Node
from accelpatch.jit.expressions import convert as converted
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import vector
from accelpatch.jit.selection.moves import move, register

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

#: (from, to) -> the instruction; other conversions go through f32
_DIRECT = {
    (a, b): f"v_cvt_{b}_{a}"
    for a, b in (("i32", "f32"), ("u32", "f32"), ("f32", "i32"), ("f32", "u32"), ("f32", "f16"), ("f16", "f32"),
                 ("f32", "f64"), ("f64", "f32"), ("i32", "f64"), ("u32", "f64"), ("f64", "i32"), ("f64", "u32"))
}  # fmt: skip


def convert(J: Builder, node: Convert, target: Value) -> None:
    dtype, to = node.operand.type, node.type
    if dtype.lanes > 1 or to.lanes > 1:
        advice = "take its lanes out by shifts, or use an instruction by name"
        fail(f"{dtype} is not converted to {to} as a whole: {advice}")
    if dtype.is_integer and to.is_integer:
        _integer(J, node, target)
    elif dtype.kind in ("i", "u") and dtype.bits < 32:
        _narrow(J, node, target)
    elif (str(dtype), str(to)) in _DIRECT:
        vector.emit(J, _DIRECT[str(dtype), str(to)], target, J.operand(node.operand))
    elif str(dtype) == "bf16" and str(to) == "f32":
        vector.emit(J, "v_lshlrev_b32", target, Constant(16, types.U32), J.operand(node.operand))
    elif str(dtype) == "f32" and str(to) == "bf16":
        _to_bfloat16(J, node.operand, target)
    elif types.F32 not in (dtype, to):
        J.compute(converted(converted(node.operand, types.F32), to), target)
    else:
        fail(f"no instruction converts {dtype} to {to}")


def _integer(J: Builder, node: Convert, target: Value) -> None:
    """An integer extended by zeros or its sign, truncated to the low half, or unchanged."""
    dtype, to, x = node.operand.type, node.type, J.operand(node.operand)
    if isinstance(x, Constant):
        move(J, target, Constant(x.value, to))
    elif to.bits <= dtype.bits:
        J.compute(x.dword(0) if to.bits < dtype.bits else x, target)
    else:
        move(J, target.dword(0), x)
        if dtype.kind == "u":
            move(J, target.dword(1), Constant(0, types.U32))
        elif target.file == "s":
            J.emit("s_ashr_i32", target.dword(1), target.dword(0), 31)
        else:
            J.emit("v_ashrrev_i32", target.dword(1), 31, target.dword(0))


def _narrow(J: Builder, node: Convert, target: Value) -> None:
    """An integer of 8 or 16 bits in the low part of a register, whose upper part is undefined."""
    dtype, x = node.operand.type, J.operand(node.operand)
    if node.type.bits != 32 or not node.type.is_integer:
        whole = converted(node.operand, types.I32 if dtype.kind == "i" else types.U32)
        J.compute(converted(whole, node.type), target)
    elif target.file == "s" and dtype.kind == "i":
        J.emit(f"s_sext_i32_i{dtype.bits}", target, x)
    elif target.file == "s":
        J.emit("s_and_b32", target, x, (1 << dtype.bits) - 1)
    elif dtype.kind == "i":
        vector.emit(J, "v_bfe_i32", target, x, Constant(0, types.U32), Constant(dtype.bits, types.U32))
    else:
        vector.emit(J, "v_and_b32", target, Constant((1 << dtype.bits) - 1, types.U32), x)


def _to_bfloat16(J: Builder, x: Node, target: Value) -> None:
    """Rounded to nearest even; NaN stays NaN."""
    source = register(J, J.operand(x), "v")
    if J.arch == "gfx950":
        J.emit("v_cvt_pk_bf16_f32", target, source, 0)
        return
    odd, rounded, quiet = (J.temporary("v", types.U32) for _ in range(3))
    J.emit("v_bfe_u32", odd, source, 16, 1)
    half = register(J, Constant(0x7FFF, types.U32), "s")
    J.emit("v_add3_u32", rounded, source, odd, half)
    J.emit("v_or_b32", quiet, hex(0x400000), source)
    nan = J.temporary("s", types.U64)
    J.emit("v_cmp_u_f32", nan, source, source)
    J.emit("v_cndmask_b32", rounded, rounded, quiet, nan)
    J.emit("v_lshrrev_b32", target, 16, rounded)
