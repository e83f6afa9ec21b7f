"""Copies between scalar, vector and accumulator registers, and loads of constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpatch.jit import types
from accelpatch.jit.constants import inline_text, is_inline, text, words
from accelpatch.jit.expressions import Constant
from accelpatch.jit.registers import Value

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder

Result = Value | Constant
#: (to, from) -> the instruction that copies 32 bits
_COPY = {
    ("s", "s"): "s_mov_b32", ("v", "s"): "v_mov_b32", ("v", "v"): "v_mov_b32", ("s", "v"): "v_readfirstlane_b32",
    ("a", "v"): "v_accvgpr_write_b32", ("v", "a"): "v_accvgpr_read_b32", ("a", "a"): "v_accvgpr_mov_b32",
}  # fmt: skip


def move(J: Builder, target: Value, source: Result) -> None:
    """Copy one element, or a constant, into registers."""
    if isinstance(source, Constant):
        _load(J, target, source)
    elif (source.register, source.first) != (target.register, target.first):
        _copy(J, target, source)


def _copy(J: Builder, target: Value, source: Value) -> None:
    pair = target.dwords == 2 and not (target.first % 2 or source.first % 2)
    if pair and target.file == source.file == "s":
        J.emit("s_mov_b64", target, source)
        return
    if (target.file, source.file) not in _COPY:  # scalar and accumulator: through a vector register
        between = J.temporary("v", source.type)
        _copy(J, between, source)
        source = between
    for at in range(target.dwords):
        J.emit(_COPY[target.file, source.file], target.dword(at), source.dword(at))


def _load(J: Builder, target: Value, source: Constant) -> None:
    dtype, values = source.type, words(source)
    inline = inline_text(source)
    if target.file == "s" and len(values) == 2 and inline is not None:
        J.emit("s_mov_b64", target, inline)
        return
    for at, value in enumerate(values):
        word = text(value, dtype if len(values) == 1 else types.U32)
        if target.file == "s" and not is_inline(value, dtype) and (value + 0x8000) & 0xFFFFFFFF < 0x10000:
            J.emit("s_movk_i32", target.dword(at), hex(value & 0xFFFF))
        elif target.file == "a" and not is_inline(value, dtype):
            between = J.temporary("v", types.U32)
            J.emit("v_mov_b32", between, word)
            J.emit("v_accvgpr_write_b32", target.dword(at), between)
        else:
            J.emit({"s": "s_mov_b32", "v": "v_mov_b32", "a": "v_accvgpr_write_b32"}[target.file],
                   target.dword(at), word)  # fmt: skip


def register(J: Builder, source: Result, file: str) -> Value:
    """A value in a register of a file; it is copied unless it is in one."""
    if isinstance(source, Value) and source.file == file:
        return source
    made = J.temporary(file, source.type)
    move(J, made, source)
    return made


def readable(J: Builder, source: Result) -> Result:
    """A value as an operand of arithmetic: accumulators are copied to vector registers."""
    return register(J, source, "v") if isinstance(source, Value) and source.file == "a" else source


def half(source: Result, at: int) -> Result:
    """The low (0) or high (1) 32 bits of a 64-bit value, as u32."""
    if isinstance(source, Constant):
        return Constant(words(source, 2)[at], types.U32)
    return source.dword(at)
