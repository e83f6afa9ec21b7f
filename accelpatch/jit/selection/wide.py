"""Integers of 64 bits, in pairs of registers; most operations are computed on one half at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.expressions import Binary, Constant, Convert, Node, Unary, compare, constant, select
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import patterns, scalar, vector
from accelpatch.jit.selection.moves import Result, half, move, register

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

Halves = tuple[Result, Result]
_ZERO = Constant(0, types.U32)
_LOGIC = {"&": "and", "|": "or", "^": "xor"}
_SHIFT = {("<<", "s"): "s_lshl_b64", ("<<", "v"): "v_lshlrev_b64"}


def halves(J: Builder, node: Node) -> Halves:
    """Low and high 32 bits of an expression; the high ones of a widened u32 are a constant."""
    if isinstance(node, Convert) and node.operand.type.bits == 32 and node.operand.type.kind == "u":
        return J.operand(node.operand), _ZERO
    whole = J.operand(node)
    return half(whole, 0), half(whole, 1)


def binary(J: Builder, node: Binary, target: Value) -> None:
    if node.op in ("min", "max"):
        left, right = J.operand(node.left), J.operand(node.right)
        J.compute(select(compare("<" if node.op == "min" else ">", left, right), left, right), target)
    elif node.op in _LOGIC:
        _logic(J, node, target)
    elif node.op in ("<<", ">>"):
        _shift(J, node.op, node.left, node.right, target)
    elif node.op == "*":
        _multiply(J, node, target)
    else:
        _add(J, node, target)


def _add(J: Builder, node: Binary, target: Value) -> None:
    if node.op == "+" and target.file == "v" and J.arch != "gfx90a" and _shift_add(J, node, target):
        return
    (low, high), (low2, high2) = halves(J, node.left), halves(J, node.right)
    add = node.op == "+"
    if target.file == "s":
        scalar.emit(J, "s_add_u32" if add else "s_sub_u32", target.dword(0), low, low2)
        # emit may insert s_mov for a literal before the addc; that does not change the carry in SCC.
        scalar.emit(J, "s_addc_u32" if add else "s_subb_u32", target.dword(1), high, high2)
        return
    carry, ignored = J.temporary("s", types.U64), J.temporary("s", types.U64)
    first = [vector.vector_or_inline(J, one) for one in (low, low2)]
    J.emit("v_add_co_u32" if add else "v_sub_co_u32", target.dword(0), carry, *first)
    second = [vector.vector_or_inline(J, one) for one in (high, high2)]
    J.emit("v_addc_co_u32" if add else "v_subb_co_u32", target.dword(1), ignored, *second, carry)


def _shift_add(J: Builder, node: Binary, target: Value) -> bool:
    """(x << k) + y as one instruction, for k up to 4 (0 without a shift)."""
    x, by, y = node.left, 0, node.right
    for one, other in patterns.both_orders(node):
        value = patterns.integer(one.right) if isinstance(one, Binary) and one.op in ("<<", "*") else None
        shift = value if patterns.is_op(one, "<<") else patterns.exact_log2(value)
        if isinstance(one, Binary) and shift is not None and shift <= 4:
            x, by, y = one.left, shift, other
            break
    vector.emit(J, "v_lshl_add_u64", target, J.operand(x), Constant(by, types.U32), J.operand(y))
    return True


def _logic(J: Builder, node: Binary, target: Value) -> None:
    left, right = J.operand(node.left), J.operand(node.right)
    name = _LOGIC[node.op]
    if target.file == "s" and isinstance(left, Value) and isinstance(right, Value):
        J.emit(f"s_{name}_b64", target, left, right)
        return
    for at in range(2):
        a, b, into = half(left, at), half(right, at), target.dword(at)
        value = patterns.integer(b)
        if value in (0, 0xFFFFFFFF):
            keeps = (value == 0) == (node.op != "&")
            if keeps or node.op != "^":
                move(J, into, a if keeps else constant(value, types.U32))  # type: ignore[arg-type]
                continue
        if target.file == "s":
            scalar.emit(J, f"s_{name}_b32", into, a, b)
        else:
            vector.emit(J, f"v_{name}_b32", into, a, b)


def _shift(J: Builder, op: str, x: Node, by: Node, target: Value) -> None:
    right = "ashr" if x.type.kind == "i" else "lshr"
    kind = "i" if right == "ashr" else "b"
    amount = J.operand(by)
    if isinstance(amount, Value) and amount.type.bits == 64:
        amount = amount.dword(0)
    if target.file == "s":
        name = _SHIFT.get((op, "s"), f"s_{right}_{kind}64")
        J.emit(name, target, register(J, J.operand(x), "s"), amount)
    else:
        name = _SHIFT.get((op, "v"), f"v_{right}rev_{kind}64")
        J.emit(name, target, amount, register(J, J.operand(x), "v"))


def _multiply(J: Builder, node: Binary, target: Value) -> None:
    by = patterns.exact_log2(patterns.integer(node.right))
    if by is not None:
        _shift(J, "<<", node.left, Constant(by, types.U32), target)
        return
    (low, high), (low2, high2) = halves(J, node.left), halves(J, node.right)
    terms = [(a, b) for a, b in ((low, high2), (high, low2)) if 0 not in (patterns.integer(a), patterns.integer(b))]
    if target.file == "s":
        low, low2 = register(J, low, "s"), register(J, low2, "s")
        whole = J.temporary("s", types.U64)
        J.emit("s_mul_hi_u32", whole.dword(1), low, low2)
        J.emit("s_mul_i32", whole.dword(0), low, low2)
    else:
        whole, carry = J.temporary("v", types.U64), J.temporary("s", types.U64)
        first, second = (register(J, one, "v") for one in (low, low2))
        J.emit("v_mad_u64_u32", whole, carry, first, second, 0)
    for a, b in terms:
        product = J.compute(Binary("*", a, b))
        J.compute(Binary("+", whole.dword(1), product), whole.dword(1))
    move(J, target, whole)


def invert(J: Builder, node: Unary, target: Value) -> None:
    """~x, of 32 or 64 bits."""
    x = J.operand(node.operand)
    if target.file == "s" and target.dwords == 2:
        J.emit("s_not_b64", target, x)
        return
    for at in range(target.dwords):
        part = half(x, at) if target.dwords == 2 else x
        J.emit("s_not_b32" if target.file == "s" else "v_not_b32", target.dword(at), part)
