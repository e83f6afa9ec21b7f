"""Expressions on registers: trees, which become instructions when they are assigned, tested or used as an operand.

accelpatch.jit.selection emits the instructions. Constants are folded while a tree is built, also in sums such as
(x + 1) + 2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from accelpatch.jit import types
from accelpatch.jit.location import fail
from accelpatch.jit.types import B1, Type


class Node:
    """An expression. file: the register file of its result, s or v; a for accumulators themselves. type: of an element.
    count: how many elements it has."""

    file: str
    type: Type
    count: int = 1

    def element(self, at: int) -> Node:
        """The expression of one element. An expression with a single element is broadcast: it is every element."""
        raise NotImplementedError

    def __getitem__(self, at: Any) -> Node:
        if not isinstance(at, int) or not -self.count <= at < self.count:
            fail(f"an expression of {self.count} elements has no element {at!r}")
        return self.element(at % self.count)

    def to(self, name: str) -> Node:
        """Converted to another type, such as "f32"; floats become integers towards zero."""
        return convert(self, types.element(name))

    def __bool__(self) -> NoReturn:
        fail("an expression on registers has no value while the kernel is built: use J.If, J.While, &, | and ~")

    def __iter__(self) -> NoReturn:
        fail("an expression on registers cannot be iterated over")

    __hash__ = object.__hash__


Given = Node | int | float


@dataclass(eq=False)
class Constant(Node):
    """A number, with the type of the other operand."""

    value: int | float
    type: Type

    file = "s"

    def element(self, at: int) -> Node:
        return self


@dataclass(eq=False)
class Binary(Node):
    """op: + - * / % << >> & | ^ min max, and mulhi, the upper half of the product of integers."""

    op: str
    left: Node
    right: Node

    def __post_init__(self) -> None:
        self.type, self.count = self.left.type, _count(self.left, self.right)
        self.file = _file(self.left, self.right)

    def element(self, at: int) -> Node:
        return self if self.count == 1 else Binary(self.op, self.left.element(at), self.right.element(at))


@dataclass(eq=False)
class Unary(Node):
    """op: - ~ abs."""

    op: str
    operand: Node

    def __post_init__(self) -> None:
        self.type, self.count, self.file = self.operand.type, self.operand.count, _file(self.operand)

    def element(self, at: int) -> Node:
        return self if self.count == 1 else Unary(self.op, self.operand.element(at))


@dataclass(eq=False)
class Convert(Node):
    operand: Node
    type: Type

    def __post_init__(self) -> None:
        self.count, self.file = self.operand.count, _file(self.operand)

    def element(self, at: int) -> Node:
        return self if self.count == 1 else Convert(self.operand.element(at), self.type)


class Condition(Node):
    """A truth value: one for the wavefront (file s, a scalar condition) or one per lane (file v, a vector
    condition)."""

    type = B1

    def element(self, at: int) -> Node:
        return self


@dataclass(eq=False)
class Compare(Condition):
    """op: < <= > >= == !=."""

    op: str
    left: Node
    right: Node

    def __post_init__(self) -> None:
        self.file = _file(self.left, self.right)
        if _count(self.left, self.right) != 1:
            fail("an array of registers cannot be compared: compare its elements")


@dataclass(eq=False)
class Logic(Condition):
    """op: & | ^ of two conditions, ~ of one."""

    op: str
    operands: tuple[Condition, ...]

    def __post_init__(self) -> None:
        self.file = _file(*self.operands)


@dataclass(eq=False)
class Select(Node):
    """One of two values by a condition."""

    condition: Condition
    yes: Node
    no: Node

    def __post_init__(self) -> None:
        self.type, self.count = self.yes.type, _count(self.yes, self.no)
        self.file = _file(self.condition, self.yes, self.no)

    def element(self, at: int) -> Node:
        return self if self.count == 1 else Select(self.condition, self.yes.element(at), self.no.element(at))


def _file(*nodes: Node) -> str:
    return "v" if any(node.file != "s" for node in nodes) else "s"


def _count(*nodes: Node) -> int:
    counts = {node.count for node in nodes} - {1}
    if len(counts) > 1:
        fail(f"arrays of {' and '.join(map(str, sorted(counts)))} elements do not go together")
    return counts.pop() if counts else 1


_FOLDED: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType({
    "+": operator.add, "-": operator.sub, "*": operator.mul, "<<": operator.lshift, "&": operator.and_,
    "|": operator.or_, "^": operator.xor, "min": min, "max": max,
})  # fmt: skip
_SIGNS: Mapping[str, Callable[[Any], Any]] = MappingProxyType({"-": operator.neg, "~": operator.invert, "abs": abs})
#: op -> the right operand with which x op right is x
_NEUTRAL = MappingProxyType({"+": 0, "-": 0, "*": 1, "/": 1, "<<": 0, ">>": 0, "|": 0, "^": 0})


def constant(value: Given, like: Type) -> Node:
    """A Python number as a constant of a type; an expression is returned as it is."""
    if isinstance(value, Node):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(f"{value!r} is neither a register nor a number")
    if isinstance(value, float) and not like.is_float:
        fail(f"{value!r} is used with a register of type {like}: convert that by .to('f32'), or write an integer")
    return Constant(float(value) if like.is_float else value, like)


def unified(left: Given, right: Given) -> tuple[Node, Node]:
    """Two operands, converted to one type: a number takes the other's type, i32 with u32 becomes u32, and 32 bits with
    64 are widened."""
    if isinstance(left, Node):
        right = constant(right, left.type)
    elif isinstance(right, Node):
        left = constant(left, right.type)
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    if left.type == right.type:
        return left, right
    if B1 in (left.type, right.type):
        fail("a condition cannot be computed with: use J.select(condition, yes, no)")
    if not (left.type.is_integer and right.type.is_integer):
        fail(f"{left.type} and {right.type} do not go together: convert one by .to('{left.type}')")
    bits = max(left.type.bits, right.type.bits)
    unsigned = any(node.type.kind == "u" and node.type.bits == bits for node in (left, right))
    both = Type("u" if unsigned else "i", bits)
    return convert(left, both), convert(right, both)


def convert(node: Node, to: Type) -> Node:
    if node.type == to:
        return node
    if isinstance(node, Constant):
        return Constant(float(node.value) if to.is_float else int(node.value), to)
    if node.type == B1:
        fail("a condition cannot be converted: use J.select(condition, 1, 0)")
    return Convert(node, to)


def binary(op: str, left: Given, right: Given) -> Node:
    """An operation on two expressions, with constants folded and neutral operands removed."""
    if op in ("<<", ">>") and isinstance(left, Node):
        right = constant(right, types.U32) if not isinstance(right, Node) else right
        a, b = left, right
    else:
        a, b = unified(left, right)
    if isinstance(a, Condition) and isinstance(b, Condition):
        return (
            Logic(op, (a, b)) if op in ("&", "|", "^") else fail(f"{op} is nothing that conditions have: use & and |")
        )
    if isinstance(a, Condition) or isinstance(b, Condition):
        fail("a condition cannot be computed with: use J.select(condition, yes, no)")
    if isinstance(a, Constant) and isinstance(b, Constant) and op in _FOLDED:
        return Constant(_FOLDED[op](a.value, b.value), a.type)
    if isinstance(a, Constant) and op in ("+", "*", "&", "|", "^", "min", "max"):
        a, b = b, a
    if isinstance(b, Constant):
        if b.value == _NEUTRAL.get(op) and not (a.type.is_float and op in ("+", "-")):
            return a
        if op in ("/", "%") and b.value == 0 and a.type.is_integer:
            fail("division by zero")
        if op == "-" and a.type.is_integer:
            return binary("+", a, -b.value)
        inner = a.right if isinstance(a, Binary) and op == a.op == "+" and a.type.is_integer else None
        if isinstance(a, Binary) and isinstance(inner, Constant):
            return binary("+", a.left, inner.value + b.value)
    return Binary(op, a, b)


def unary(op: str, of: Node) -> Node:
    if isinstance(of, Condition):
        return of.operands[0] if isinstance(of, Logic) and of.op == "~" else Logic("~", (of,))
    if isinstance(of, Constant):
        return Constant(_SIGNS[op](of.value), of.type)
    return Unary(op, of)


def compare(op: str, left: Given, right: Given) -> Condition:
    a, b = unified(left, right)
    mirrored = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    if isinstance(a, Constant):
        a, b, op = b, a, mirrored.get(op, op)
    return Compare(op, a, b)


def select(condition: Node, yes: Given, no: Given) -> Node:
    if not isinstance(condition, Condition):
        fail("select takes a condition, such as a < b, then two values")
    if not isinstance(yes, Node) and not isinstance(no, Node):
        like = types.F32 if isinstance(yes, float) or isinstance(no, float) else types.I32
        yes, no = constant(yes, like), constant(no, like)
    return Select(condition, *unified(yes, no))


def _operators() -> None:
    """Define Python's operators on Node, by the functions above."""
    names = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "%": "mod", "<<": "lshift", ">>": "rshift",
             "&": "and", "|": "or", "^": "xor"}  # fmt: skip
    for op, name in [*names.items(), ("/", "floordiv")]:
        setattr(Node, f"__{name}__", lambda self, other, op=op: binary(op, self, other))
        setattr(Node, f"__r{name}__", lambda self, other, op=op: binary(op, constant(other, self.type), self))
    for op, name in {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}.items():
        setattr(Node, f"__{name}__", lambda self, other, op=op: compare(op, self, other))
    for op, name in {"-": "neg", "~": "invert", "abs": "abs"}.items():
        setattr(Node, f"__{name}__", lambda self, op=op: unary(op, self))


_operators()
