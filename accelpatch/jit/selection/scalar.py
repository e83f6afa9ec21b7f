"""Integers of 32 bits in scalar registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.constants import is_inline, words
from accelpatch.jit.expressions import Binary, Constant
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import patterns
from accelpatch.jit.selection.moves import Result, move, register

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

_PLAIN = {
    "+": "s_add_u32", "-": "s_sub_u32", "*": "s_mul_i32", "&": "s_and_b32", "|": "s_or_b32", "^": "s_xor_b32",
    "<<": "s_lshl_b32",
}  # fmt: skip
_SIGNED = {">>": ("s_lshr_b32", "s_ashr_i32"), "min": ("s_min_u32", "s_min_i32"), "max": ("s_max_u32", "s_max_i32"),
           "mulhi": ("s_mul_hi_u32", "s_mul_hi_i32")}  # fmt: skip


def binary(J: Builder, node: Binary, target: Value) -> None:
    if not node.type.is_integer:
        fail(f"scalar registers compute with integers of 32 and 64 bits, not {node.type}: use a vector register")
    if _fused(J, node, target):
        return
    name = _PLAIN.get(node.op) or _SIGNED[node.op][node.type.kind == "i"]
    emit(J, name, target, J.operand(node.left), J.operand(node.right))


def emit(J: Builder, name: str, target: Value, *sources: Result) -> None:
    """Emit an instruction with two sources, of which only one may be a literal: a second one is copied to a
    register."""
    literals = {at for at, one in enumerate(sources)
                if isinstance(one, Constant) and not is_inline(words(one)[0], types.U32)}  # fmt: skip
    given = [register(J, one, "s") if at in sorted(literals)[1:] else one for at, one in enumerate(sources)]
    J.emit(name, target, *given)


def _fused(J: Builder, node: Binary, target: Value) -> bool:
    """Emit the single instruction that computes several operations; returns whether there is one."""
    if node.op == "+":
        for one, other in patterns.both_orders(node):
            shift = patterns.shifted_left(one)
            if shift and 1 <= shift[1] <= 4:
                emit(J, f"s_lshl{shift[1]}_add_u32", target, J.operand(shift[0]), J.operand(other))
                return True
    if node.op in ("*", "<<"):
        return _multiplied(J, node, target)
    field = patterns.bit_field(node)
    if field:
        emit(J, "s_bfe_u32", target, J.operand(field[0]), Constant(field[2] << 16 | field[1], types.U32))
        return True
    if node.op in ("&", "|"):
        for one, other in patterns.both_orders(node):
            inner = patterns.inverted(other)
            if inner is not None:
                emit(J, "s_andn2_b32" if node.op == "&" else "s_orn2_b32", target, J.operand(one), J.operand(inner))
                return True
    return False


def _multiplied(J: Builder, node: Binary, target: Value) -> bool:
    """x * c as a shift, or as a shift and an addition; returns whether that is possible."""
    value = patterns.integer(node.right) if node.op == "*" else None
    shift = patterns.shifted_left(node)
    if shift:
        emit(J, "s_lshl_b32", target, J.operand(shift[0]), Constant(shift[1], types.U32))
        return True
    if value == 0:
        move(J, target, Constant(0, types.U32))
        return True
    by = patterns.exact_log2(None if value is None else value - 1)
    if by is not None and 1 <= by <= 4:
        x = J.operand(node.left)
        emit(J, f"s_lshl{by}_add_u32", target, x, x)
        return True
    return False
