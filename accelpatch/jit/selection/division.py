"""Division and remainder of integers, rounded towards zero: by a constant with a multiplication, otherwise with a
reciprocal.

Sources: Hacker's Delight, chapter 10 (constants); the expansion of udiv that LLVM's AMDGPU backend documents: a
floating-point reciprocal, one Newton step and two corrections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.expressions import Binary, Constant, Node, binary, compare, constant, convert, select
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import patterns
from accelpatch.jit.selection.moves import register

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

_SCALE = 0x4F7FFFFE  # the bits of an f32 a little below 2**32, so that the scaled reciprocal is not too large


def by_variable(node: Node) -> bool:
    """Whether it is an integer division by a value that is not constant, which only vector instructions can compute."""
    is_division = isinstance(node, Binary) and node.op in ("/", "%") and node.type.is_integer
    return is_division and not isinstance(node.right, Constant)  # type: ignore[attr-defined]


def divide(J: Builder, node: Binary, target: Value) -> None:
    by = patterns.integer(node.right)
    if node.type.bits == 64 and (node.type.kind == "i" or patterns.exact_log2(by) is None):
        fail("integers of 64 bits are divided by powers of two, as u64, alone: compute with 32 bits where you can")
    if by is None:
        _by_register(J, node, target)
        return
    x = J.operand(node.left)
    power = patterns.exact_log2(by)
    if power is not None and node.type.kind == "u":
        J.compute(binary(">>", x, power) if node.op == "/" else binary("&", x, by - 1), target)
        return
    quotient = _unsigned(J, x, by) if node.type.kind == "u" else _signed(J, x, by)
    J.compute(quotient if node.op == "/" else _remainder(J, x, quotient, by), target)


def _remainder(J: Builder, x: Node, quotient: Node, by: int) -> Node:
    return binary("-", x, binary("*", J.compute(quotient), by))


def _unsigned(J: Builder, x: Node, by: int) -> Node:
    """The quotient as the product with 2**p / by, for the smallest p at which it is exact for every 32-bit x."""
    bits = by.bit_length()
    for p in range(32, 33 + bits):
        factor = -(-(1 << p) // by)
        if factor < 1 << 32 and factor * by - (1 << p) <= 1 << (p - 32):
            return binary(">>", _high(x, factor, types.U32), p - 32)
    factor = (1 << 32) * ((1 << bits) - by) // by + 1
    high = J.compute(_high(x, factor, types.U32))
    rest = binary(">>", binary("-", x, high), 1)
    return binary(">>", binary("+", rest, high), bits - 1)


def _signed(J: Builder, x: Node, by: int) -> Node:
    """As _unsigned, plus one for negative x; powers of two need only shifts."""
    size = abs(by)
    power = patterns.exact_log2(size)
    if size == 1:
        quotient: Node = x
    elif power is not None:
        last = convert(binary(">>", x, 31), types.U32)
        quotient = binary(">>", binary("+", x, convert(binary(">>", last, 32 - power), types.I32)), power)
    else:
        p = next(p for p in range(32, 64) if size - (1 << p) % size <= 1 << (p - 31))
        factor = (1 << p) // size + 1
        signed = factor - (1 << 32) if factor >= 1 << 31 else factor
        high = _high(x, signed, types.I32)
        high = binary("+", high, x) if factor >= 1 << 31 else high
        sign = convert(binary(">>", convert(x, types.U32), 31), types.I32)
        quotient = binary("+", binary(">>", high, p - 32), sign)
    return binary("-", constant(0, types.I32), quotient) if by < 0 else quotient


def _high(x: Node, factor: int, dtype: types.Type) -> Node:
    return Binary("mulhi", convert(x, dtype), Constant(factor, dtype))


def _by_register(J: Builder, node: Binary, target: Value) -> None:
    x, y = (register(J, J.operand(one), "v") for one in (node.left, node.right))
    if node.type.kind == "u":
        J.compute(_quotient(J, x, y, node.op), target)
        return
    minus_x, minus_y = (J.compute(binary(">>", one, 31)) for one in (x, y))
    size_x, size_y = (register(J, J.compute(convert(binary("^", binary("+", one, minus), minus), types.U32)), "v")
                      for one, minus in ((x, minus_x), (y, minus_y)))  # fmt: skip
    size = convert(_quotient(J, size_x, size_y, node.op), types.I32)
    minus = J.compute(binary("^", minus_x, minus_y)) if node.op == "/" else minus_x
    J.compute(binary("-", binary("^", size, minus), minus), target)


def _quotient(J: Builder, x: Value, y: Value, op: str) -> Node:
    """Quotient or remainder of unsigned vectors."""
    inverse, estimate = J.temporary("v", types.F32), J.temporary("v", types.U32)
    J.emit("v_cvt_f32_u32", inverse, y)
    J.emit("v_rcp_iflag_f32", inverse, inverse)
    J.emit("v_mul_f32", inverse, hex(_SCALE), inverse)
    J.emit("v_cvt_u32_f32", estimate, inverse)
    error = J.compute(binary("*", J.compute(binary("-", constant(0, types.U32), y)), estimate))
    inverse_of_y = J.compute(binary("+", estimate, Binary("mulhi", estimate, error)))
    quotient = J.compute(Binary("mulhi", x, inverse_of_y))
    rest = J.compute(binary("-", x, J.compute(binary("*", quotient, y))))
    more = compare(">=", rest, y)
    if op == "%":
        rest = J.compute(select(more, binary("-", rest, y), rest))
        return select(compare(">=", rest, y), binary("-", rest, y), rest)
    quotient = J.compute(select(more, binary("+", quotient, 1), quotient))
    rest = J.compute(select(more, binary("-", rest, y), rest))
    return select(compare(">=", rest, y), binary("+", quotient, 1), quotient)
