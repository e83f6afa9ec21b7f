"""Patterns of expressions that single instructions compute."""

from __future__ import annotations

from accelpatch.jit.expressions import Binary, Constant, Node, Unary


def integer(node: Node) -> int | None:
    """The value of an integer constant."""
    return int(node.value) if isinstance(node, Constant) and not isinstance(node.value, float) else None


def exact_log2(value: int | None) -> int | None:
    """k if the value is 2**k, else None."""
    return value.bit_length() - 1 if value is not None and value > 0 and not value & (value - 1) else None


def is_op(node: Node, *ops: str) -> bool:
    return isinstance(node, Binary) and node.op in ops


def shifted_left(node: Node) -> tuple[Node, int] | None:
    """(x, k) of x << k and of x * 2**k."""
    if isinstance(node, Binary) and node.op in ("<<", "*") and node.type.bits == 32 and node.type.is_integer:
        value = integer(node.right)
        by = value if node.op == "<<" else exact_log2(value)
        if by is not None and 0 <= by < 32:
            return node.left, by
    return None


def bit_field(node: Node) -> tuple[Node, int, int] | None:
    """(x, offset, width) of (x >> offset) & (2**width - 1), unless the field reaches into the sign bits that >>
    adds."""
    if not isinstance(node, Binary) or node.op != "&" or not is_op(node.left, ">>"):
        return None
    inner, mask = node.left, integer(node.right)
    assert isinstance(inner, Binary)
    offset, width = integer(inner.right), None if mask is None else exact_log2(mask + 1)
    if offset is None or width is None or not 0 < width <= 32 - offset or node.type.bits != 32:
        return None
    return inner.left, offset, width


def inverted(node: Node) -> Node | None:
    """x of ~x."""
    return node.operand if isinstance(node, Unary) and node.op == "~" else None


def both_orders(node: Binary) -> tuple[tuple[Node, Node], tuple[Node, Node]]:
    """Both orders of the operands of a commutative operation."""
    return (node.left, node.right), (node.right, node.left)
