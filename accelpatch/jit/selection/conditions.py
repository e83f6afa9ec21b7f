"""Conditions: scalar ones in the condition code SCC, vector ones as lane masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.expressions import Binary, Compare, Condition, Constant, Logic, Node, Select, binary, constant
from accelpatch.jit.ir import Block
from accelpatch.jit.registers import Value
from accelpatch.jit.selection import patterns, scalar, vector
from accelpatch.jit.selection.moves import Result, half, register

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

_NAMES = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "lg"}
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_OPPOSITE = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "=="}
_LOGIC = {"&": "s_and_b64", "|": "s_or_b64", "^": "s_xor_b64"}


def mask(J: Builder, condition: Condition) -> Value:
    """A condition as 64 bits of scalar registers: the lanes for which it holds; for a scalar condition all lanes or
    none. The bits of inactive lanes are undefined."""
    made = J.temporary("s", types.U64)
    if isinstance(condition, Compare) and (condition.file == "v" or condition.left.type.is_float):
        _compared(J, made, condition, opposite=False)
    elif condition.file == "s":
        holds = _scc(J, condition)
        J.emit("s_cselect_b64", made, -1 if holds else 0, 0 if holds else -1)
    elif isinstance(condition, Logic) and condition.op == "~":
        inner = condition.operands[0]
        if isinstance(inner, Compare):
            _compared(J, made, inner, opposite=True)
        else:
            J.emit("s_not_b64", made, mask(J, inner))
    else:
        assert isinstance(condition, Logic)
        left, right = (mask(J, one) for one in condition.operands)
        J.emit(_LOGIC[condition.op], made, left, right)
    return made


def _compared(J: Builder, target: Value, node: Compare, *, opposite: bool) -> None:
    left, right, op = J.operand(node.left), J.operand(node.right), node.op
    if isinstance(left, Value) and left.file == "v" and not (isinstance(right, Value) and right.file == "v"):
        left, right, op = right, left, _MIRRORED[op]  # a literal can only be the first
    if not (isinstance(right, Value) and right.file == "v"):
        right = register(J, right, "v")
    dtype = node.left.type
    if dtype.is_float:
        # Comparisons with NaN are false, except !=; so "not <" differs from ">=", and has an instruction of its own.
        name = "neq" if op == "!=" else _NAMES[op]
        name = {"neq": "eq", "eq": "neq"}.get(name, f"n{name}") if opposite else name
    else:
        op = _OPPOSITE[op] if opposite else op
        name = "ne" if op == "!=" else _NAMES[op]
    vector.emit(J, f"v_cmp_{name}_{dtype}", target, left, right)


def _scc(J: Builder, condition: Condition) -> bool:
    """Emit instructions that set SCC to the condition, or to its negation; returns which: True for the condition."""
    if isinstance(condition, Logic):
        if condition.op == "~":
            return not _scc(J, condition.operands[0])
        one, zero = constant(1, types.U32), constant(0, types.U32)
        left, right = (J.compute(Select(each, one, zero)) for each in condition.operands)
        J.emit({"&": "s_and_b32", "|": "s_or_b32", "^": "s_xor_b32"}[condition.op], J.temporary("s", types.U32),
               left, right)  # fmt: skip
        return True
    assert isinstance(condition, Compare)
    node, dtype = condition, condition.left.type
    if dtype.is_float:
        J.emit("s_cmp_lg_u64", mask(J, node), 0)
        return True
    if dtype.bits == 64:
        return _scc_wide(J, node)
    if node.op in ("==", "!=") and patterns.integer(node.right) == 0 and patterns.is_op(node.left, "&"):
        return _scc_bits(J, node)
    kind = "u" if dtype.kind == "u" else "i"
    left, right = J.operand(node.left), J.operand(node.right)
    J.emit(f"s_cmp_{_NAMES[node.op]}_{kind}32", *_one_literal(J, left, right))
    return True


def _one_literal(J: Builder, left: Result, right: Result) -> tuple[Result, Result]:
    both = isinstance(left, Constant) and isinstance(right, Constant)
    return (register(J, left, "s") if both else left), right


def _scc_bits(J: Builder, node: Compare) -> bool:
    """(x & m) == 0 and != 0: s_and sets SCC itself, and s_bitcmp tests a single bit."""
    assert isinstance(node.left, Binary)
    bit = patterns.exact_log2(patterns.integer(node.left.right))
    if bit is not None:
        J.emit("s_bitcmp1_b32" if node.op == "!=" else "s_bitcmp0_b32", J.operand(node.left.left), bit)
        return True
    scalar.binary(J, node.left, J.temporary("s", types.U32))
    return node.op == "!="


def _scc_wide(J: Builder, node: Compare) -> bool:
    left, right = J.operand(node.left), J.operand(node.right)
    if node.op in ("==", "!="):
        zero = isinstance(right, Constant) and right.value == 0
        J.emit(f"s_cmp_{_NAMES[node.op]}_u64", register(J, left, "s"), 0 if zero else register(J, right, "s"))
        return True
    if node.op in (">", "<="):
        left, right = right, left
    highs: list[Node] = [half(one, 1) for one in (left, right)]
    if node.left.type.kind == "i":
        highs = [J.compute(binary("^", one, 1 << 31)) for one in highs]
    ignored = J.temporary("s", types.U32)
    scalar.emit(J, "s_sub_u32", ignored, half(left, 0), half(right, 0))
    scalar.emit(J, "s_subb_u32", ignored, *(J.operand(one) for one in highs))  # SCC is the borrow: left < right
    return node.op in ("<", ">")


def branch(J: Builder, condition: Condition, to: Block, *, when: bool) -> None:
    """Jump to a block if a scalar condition is ``when``; & and | skip their second operand if the first decides."""
    if isinstance(condition, Logic) and condition.op == "~":
        branch(J, condition.operands[0], to, when=not when)
    elif isinstance(condition, Logic) and condition.op in ("&", "|"):
        first, second = condition.operands
        if (condition.op == "|") == when:
            branch(J, first, to, when=when)
            branch(J, second, to, when=when)
        else:
            past = J.new_block("past")
            branch(J, first, past, when=not when)
            branch(J, second, to, when=when)
            J.start(past)
    else:
        J.jump("s_cbranch_scc1" if _scc(J, condition) == when else "s_cbranch_scc0", to)


def choose(J: Builder, node: Select, target: Value) -> None:
    """One of two values by a condition."""
    yes, no = J.operand(node.yes), J.operand(node.no)
    if target.file == "s":
        holds = _scc(J, node.condition)
        first, second = (yes, no) if holds else (no, yes)
        for at in range(target.dwords):
            pair = (half(one, at) if target.dwords == 2 else one for one in (first, second))
            scalar.emit(J, "s_cselect_b32", target.dword(at), *pair)
        return
    lanes = mask(J, node.condition)
    for at in range(target.dwords):
        parts = (vector.vector_or_inline(J, half(one, at) if target.dwords == 2 else one) for one in (no, yes))
        J.emit("v_cndmask_b32", target.dword(at), *parts, lanes)
