"""Integers of 32 bits and floats in vector registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accelpatch.jit import table, types
from accelpatch.jit.constants import inline_text
from accelpatch.jit.expressions import Binary, Constant, Node, Unary
from accelpatch.jit.ir import Part
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import patterns
from accelpatch.jit.selection.moves import Result, move, register

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

_INTEGER = {
    "+": "v_add_u32", "-": "v_sub_u32", "*": "v_mul_lo_u32", "&": "v_and_b32", "|": "v_or_b32", "^": "v_xor_b32",
    "<<": "v_lshlrev_b32",
}  # fmt: skip
_SIGNED = {">>": ("v_lshrrev_b32", "v_ashrrev_i32"), "min": ("v_min_u32", "v_min_i32"),
           "max": ("v_max_u32", "v_max_i32"), "mulhi": ("v_mul_hi_u32", "v_mul_hi_i32")}  # fmt: skip
_FLOAT = {
    "f32": {"+": "v_add_f32", "-": "v_sub_f32", "*": "v_mul_f32", "min": "v_min_f32", "max": "v_max_f32"},
    "f16": {"+": "v_add_f16", "-": "v_sub_f16", "*": "v_mul_f16", "min": "v_min_f16", "max": "v_max_f16"},
    "f64": {"+": "v_add_f64", "*": "v_mul_f64", "min": "v_min_f64", "max": "v_max_f64"},
    "f16x2": {"+": "v_pk_add_f16", "*": "v_pk_mul_f16", "min": "v_pk_min_f16", "max": "v_pk_max_f16"},
}
_FUSED = {"f32": "v_fma_f32", "f16": "v_fma_f16", "f64": "v_fma_f64", "f16x2": "v_pk_fma_f16"}
_REVERSED = {"v_sub_u32": "v_subrev_u32", "v_sub_f32": "v_subrev_f32", "v_sub_f16": "v_subrev_f16"}
_COMMUTE = frozenset(name for name in (*_INTEGER.values(), *(one for row in _FLOAT.values() for one in row.values()))
                     if "sub" not in name and "lshl" not in name) | {"v_min_u32", "v_max_u32", "v_min_i32",
                                                                     "v_max_i32"}  # fmt: skip
_SIGN = {"f32": 1 << 31, "f16": 1 << 15, "f16x2": 1 << 31 | 1 << 15}


def binary(J: Builder, node: Binary, target: Value) -> None:
    if node.type.is_integer:
        if not _fused_integer(J, node, target):
            _plain_integer(J, node, target)
    else:
        _float(J, node, target)


def emit(J: Builder, name: str, target: Value | str, *sources: Result, mod: str = "") -> None:
    """Emit a vector ALU instruction. It can read one scalar register or literal (LLVM's constant bus limit): further
    ones are copied to vector registers."""
    given = list(sources)
    form = table.lookup(name)[0]
    # Only the short (32-bit) encoding can have a literal, and it can write a lane mask only to vcc.
    short = "short" in form.flags and not any(slot.writes and slot.kinds == "s" for slot in form.operands)
    swappable = "short" in form.flags and (name in _COMMUTE or name in _REVERSED)
    if swappable and _is_vector(given[0]) and not _is_vector(given[1]):
        given, name = given[::-1], _REVERSED.get(name, name)
    given = _within_constant_bus(J, given, short=short)
    J.emit(name, target, *given, mod=mod)


def _within_constant_bus(J: Builder, sources: Sequence[Result], *, short: bool) -> list[Result]:
    given = list(sources)
    scalars = [one for one in given if isinstance(one, Value) and one.file == "s"]
    for at, one in enumerate(given):
        if isinstance(one, Value) and one.file == "s" and not _same_register(one, scalars[0]):
            given[at] = register(J, one, "v")
    file = "v" if scalars else "s"
    for at, one in enumerate(given):
        if isinstance(one, Constant) and inline_text(one) is None:
            others = [other for place, other in enumerate(given) if place != at]
            if short and at == 0 and one.type.bits != 64 and all(map(_is_vector, others)):
                continue
            given[at], file = register(J, one, file), "v"
    return given


def _same_register(one: Value, other: Value) -> bool:
    return (one.register, one.first) == (other.register, other.first)


def vector_or_inline(J: Builder, source: Result) -> Result:
    """A source of an instruction that also reads a lane mask, and so can read no other scalar register or literal."""
    plain = _is_vector(source) or (isinstance(source, Constant) and inline_text(source) is not None)
    return source if plain else register(J, source, "v")


def _is_vector(source: Result) -> bool:
    return isinstance(source, Value) and source.file == "v"


def _plain_integer(J: Builder, node: Binary, target: Value) -> None:
    name = _INTEGER.get(node.op) or _SIGNED[node.op][node.type.kind == "i"]
    left, right = J.operand(node.left), J.operand(node.right)
    if "rev" in name:
        left, right = right, left
    emit(J, name, target, left, right)


def _fused_integer(J: Builder, node: Binary, target: Value) -> bool:
    """Emit the single instruction that computes several operations; returns whether there is one."""
    if node.op in ("*", "<<") and _multiplied(J, node, target):
        return True
    field = patterns.bit_field(node)
    if field:
        offset, width = Constant(field[1], types.U32), Constant(field[2], types.U32)
        emit(J, "v_bfe_u32", target, J.operand(field[0]), offset, width)
        return True
    for one, other in patterns.both_orders(node) if node.op in ("+", "|") else ():
        shift = patterns.shifted_left(one)
        if shift:
            name = "v_lshl_add_u32" if node.op == "+" else "v_lshl_or_b32"
            emit(J, name, target, J.operand(shift[0]), Constant(shift[1], types.U32), J.operand(other))
            return True
        for inner, outer, name in (("+", "+", "v_add3_u32"), ("^", "+", "v_xad_u32"), ("|", "|", "v_or3_b32"),
                                   ("&", "|", "v_and_or_b32")):  # fmt: skip
            if node.op == outer and isinstance(one, Binary) and one.op == inner and one.file == "v":
                emit(J, name, target, J.operand(one.left), J.operand(one.right), J.operand(other))
                return True
    return False


def _multiplied(J: Builder, node: Binary, target: Value) -> bool:
    """x * c as a shift, a shift and an addition, or a shift and a subtraction: a multiplication takes four times as
    long as any of these. Returns whether it has been computed."""
    shift, value = patterns.shifted_left(node), patterns.integer(node.right) if node.op == "*" else None
    if shift:
        x, by = shift
        if patterns.is_op(x, "+") and isinstance(x, Binary) and x.file == "v":
            emit(J, "v_add_lshl_u32", target, J.operand(x.left), J.operand(x.right), Constant(by, types.U32))
        else:
            emit(J, "v_lshlrev_b32", target, Constant(by, types.U32), J.operand(x))
        return True
    if value is None or node.op != "*":
        return False
    if value == 0:
        move(J, target, Constant(0, types.U32))
        return True
    value &= 0xFFFFFFFF
    more, less = patterns.exact_log2(value - 1), patterns.exact_log2(value + 1)
    x = J.operand(node.left)
    if less == 32:
        emit(J, "v_sub_u32", target, Constant(0, types.U32), x)
    elif more:
        emit(J, "v_lshl_add_u32", target, x, Constant(more, types.U32), x)
    elif less:
        between = J.temporary("v", node.type)
        emit(J, "v_lshlrev_b32", between, Constant(less, types.U32), x)
        emit(J, "v_sub_u32", target, between, x)
    else:
        emit(J, "v_mul_lo_u32", target, x, J.operand(node.right))
    return True


def _float(J: Builder, node: Binary, target: Value) -> None:
    name = _FLOAT.get(str(node.type), {}).get(node.op)
    if node.op == "/":
        _divide(J, node, target)
    elif node.op == "+" and str(node.type) in _FUSED and _multiply_add(J, node, target):
        return
    elif node.op == "-" and str(node.type) in ("f64", "f16x2"):
        negated = J.operand(Unary("-", node.right))
        emit(J, _FLOAT[str(node.type)]["+"], target, J.operand(node.left), negated)
    elif name is None:
        fail(f"no instruction computes {node.op} of {node.type}: convert to f32 by .to('f32')")
    else:
        emit(J, name, target, J.operand(node.left), J.operand(node.right))


def _multiply_add(J: Builder, node: Binary, target: Value) -> bool:
    """a * b + c as a fused multiply-add, rounded once; returns whether the sum has a product."""
    for one, other in patterns.both_orders(node):
        if not isinstance(one, Binary) or one.op != "*" or one.count != 1:
            continue
        a, b, c = J.operand(one.left), J.operand(one.right), J.operand(other)
        same = isinstance(c, Value) and _same_register(c, target)
        if same and str(node.type) == "f32" and (_is_vector(a) or _is_vector(b)):
            first, second = (a, b) if _is_vector(b) else (b, a)
            emit(J, "v_fmac_f32", target, first, second)
        else:
            emit(J, _FUSED[str(node.type)], target, a, b, c)
        return True
    return False


def pair(J: Builder, node: Node, target: Value, at: int) -> bool:
    """Compute two elements of an f32 array by one packed instruction; returns whether there is one for the expression,
    and all arrays have these elements in aligned pairs of registers."""
    if not isinstance(node, Binary) or str(node.type) != "f32" or node.op not in ("+", "*"):
        return False
    product = node.left if patterns.is_op(node.left, "*") else node.right if patterns.is_op(node.right, "*") else None
    operands: tuple[Node, ...]
    if node.op == "+" and isinstance(product, Binary):
        addend = node.left if product is node.right else node.right
        name, operands = "v_pk_fma_f32", (product.left, product.right, addend)
    else:
        name, operands = ("v_pk_add_f32" if node.op == "+" else "v_pk_mul_f32"), (node.left, node.right)
    values = [one for one in (target, *operands)
              if isinstance(one, Value) and one.file == "v" and one.count == target.count]  # fmt: skip
    if at + 1 >= target.count or len(values) != len(operands) + 1 or any((one.first + at) % 2 for one in values):
        return False
    parts = (Part(one.register, one.first + at, 2) for one in values)
    J.emit(name, *parts)
    return True


def _divide(J: Builder, node: Binary, target: Value) -> None:
    """x / y as x times v_rcp(y), which is accurate to one unit in the last place."""
    dtype = str(node.type)
    if dtype not in ("f32", "f16"):
        fail(f"no instruction divides {dtype}: convert to f32 by .to('f32')")
    divisor = node.right
    if isinstance(divisor, Constant):
        inverse: Result = Constant(1.0 / float(divisor.value), node.type)
    else:
        made = J.temporary("v", node.type)
        emit(J, f"v_rcp_{dtype}", made, J.operand(divisor))
        inverse = made
    one = isinstance(node.left, Constant) and node.left.value == 1.0
    if one:
        move(J, target, inverse)
    else:
        emit(J, f"v_mul_{dtype}", target, J.operand(node.left), inverse)


def sign(J: Builder, node: Unary, target: Value) -> None:
    """-x and abs(x) of floats."""
    if node.type.kind == "f" and node.type.bits == 64:
        x = J.operand(node.operand)
        assert isinstance(x, Value)
        low, high = x.dword(0), x.dword(1)
        move(J, target.dword(0), low)
        target, source, bit = target.dword(1), high, 1 << 31
    elif str(node.type) in _SIGN:
        source, bit = J.operand(node.operand), _SIGN[str(node.type)]  # type: ignore[assignment]
    else:
        fail(f"no instruction computes {node.op} of {node.type}: convert to f32 by .to('f32')")
    name, mask = ("v_xor_b32", bit) if node.op == "-" else ("v_and_b32", 0xFFFFFFFF ^ bit)
    emit(J, name, target, Constant(mask, types.U32), source)
