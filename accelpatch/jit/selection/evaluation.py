"""Evaluates expressions element by element: chooses the rule for a node, and where its result goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from accelpatch.jit.expressions import (
    Binary,
    Condition,
    Constant,
    Convert,
    Node,
    Select,
    Unary,
    binary,
    constant,
    select,
)
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import conditions, conversion, division, scalar, vector, wide
from accelpatch.jit.selection.moves import Result, move, readable
from accelpatch.jit.types import Type

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder


def assign(J: Builder, target: Value, node: Node) -> None:
    """Write an expression into registers, element by element; one of a single element goes into each."""
    node = _fitting(target, node)
    if node.count not in (1, target.count):
        fail(f"{node.count} elements do not fit into {target.count} registers")
    if node.count == 1:
        only = target.count == 1
        made = evaluate(J, node, target.element(0) if only else None)
        for at in range(0 if only else target.count):
            move(J, target.element(at), made)
        return
    # If the expression reads other elements of the target's array, it is computed in a temporary first.
    overlaps = any(leaf.register is target.register and leaf.first != target.first for leaf in leaves(node))
    where = J.temporary(target.file, target.type, target.count) if overlaps else target
    at = 0
    while at < target.count:
        paired = vector.pair(J, node, where, at)
        if not paired:
            evaluate(J, node.element(at), where.element(at))
        at += 2 if paired else 1
    for at in range(target.count if overlaps else 0):
        move(J, target.element(at), where.element(at))


def _fitting(target: Value, node: Node) -> Node:
    """The expression with the target's type. Raises CompileError where that needs a conversion that may lose bits."""
    dtype = target.type
    if isinstance(node, Constant):
        return constant(node.value, dtype) if not isinstance(node.value, float) or dtype.is_float else node
    if isinstance(node, Condition):
        return node if (target.file, dtype.bits) == ("s", 64) else select(node, constant(1, dtype), constant(0, dtype))
    same = node.type == dtype or (node.type.is_integer and dtype.is_integer and node.type.bits == dtype.bits)
    if same or (node.type.is_integer and dtype.is_integer and node.type.bits < dtype.bits):
        return Convert(node, dtype) if node.type.bits < dtype.bits else node
    return fail(f"{node.type} is assigned to registers of {dtype}: convert it by .to('{dtype}'), or .view its bits")


def leaves(node: Node) -> Iterator[Value]:
    """The registers that an expression reads."""
    if isinstance(node, Value):
        yield node
    for child in _children(node):
        yield from leaves(child)


def _children(node: Node) -> tuple[Node, ...]:
    found = (getattr(node, name, None) for name in ("left", "right", "condition", "yes", "no", "operand"))
    return (*(one for one in found if one is not None), *getattr(node, "operands", ()))


def evaluate(J: Builder, node: Node, target: Value | None = None) -> Result:
    """Compute one element into the target, if there is one. Otherwise registers and constants are returned as they are,
    and other results are in a temporary."""
    if isinstance(node, Value | Constant):
        if target is None:
            return node
        move(J, target, node)
        return target
    if isinstance(node, Condition):
        return evaluate(J, conditions.mask(J, node), target)
    if isinstance(node, Convert) and _same_bits(node):
        return _retyped(evaluate(J, node.operand, target), node.type)
    file = "v" if node.file != "s" or node.type.is_float or division.by_variable(node) else "s"
    fits = target is not None and target.file == file and (node.type.dwords == 1 or not _overlaps_shifted(target, node))
    where = target if target is not None and fits else J.temporary(file, node.type)
    _RULES[type(node)](J, node, where)
    if target is not None and where is not target:
        move(J, target, where)
        return target
    return where


def _same_bits(node: Convert) -> bool:
    dtype, to = node.operand.type, node.type
    return dtype.is_integer and to.is_integer and dtype.bits == to.bits


def _retyped(made: Result, dtype: Type) -> Result:
    """The same bits as another type."""
    if isinstance(made, Constant):
        return Constant(made.value, dtype)
    return Value(made.register, made.first, made.shape, dtype, made.assign)


def _overlaps_shifted(target: Value, node: Node) -> bool:
    """Whether an operand shares one of two registers with the target, so that the first write may overwrite it."""
    near = (leaf.first - target.first for leaf in leaves(node) if leaf.register is target.register)
    return any(distance and abs(distance) < 2 for distance in near)


def operand(J: Builder, node: Node) -> Result:
    """The value of a node as an operand of arithmetic."""
    return readable(J, evaluate(J, node))


def _binary(J: Builder, node: Node, target: Value) -> None:
    assert isinstance(node, Binary)
    if node.op in ("/", "%") and node.type.is_integer:
        division.divide(J, node, target)
    elif node.type.is_integer and node.type.bits == 64:
        wide.binary(J, node, target)
    elif target.file == "s":
        scalar.binary(J, node, target)
    else:
        vector.binary(J, node, target)


def _unary(J: Builder, node: Node, target: Value) -> None:
    assert isinstance(node, Unary)
    if node.op == "-" and node.type.is_integer:
        evaluate(J, binary("-", constant(0, node.type), node.operand), target)
    elif node.op == "~" and node.type.is_integer:
        wide.invert(J, node, target)
    elif node.op == "abs" and node.type.is_integer and target.file == "s":
        J.emit("s_abs_i32", target, operand(J, node.operand))
    elif node.op == "abs" and node.type.is_integer:
        evaluate(J, binary("max", node.operand, binary("-", constant(0, node.type), node.operand)), target)
    else:
        vector.sign(J, node, target)


def _convert(J: Builder, node: Node, target: Value) -> None:
    assert isinstance(node, Convert)
    conversion.convert(J, node, target)


def _select(J: Builder, node: Node, target: Value) -> None:
    assert isinstance(node, Select)
    conditions.choose(J, node, target)


_RULES: Mapping[type[Node], Callable[[Builder, Node, Value], None]] = MappingProxyType({
    Binary: _binary, Unary: _unary, Convert: _convert, Select: _select,
})  # fmt: skip
