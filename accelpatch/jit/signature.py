"""A kernel's parameters: which of them are run-time arguments, and checks of the values passed for these."""

from __future__ import annotations
import __future__

import ast
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accelpatch.errors import ArgumentError
from accelpatch.jit.location import Line, fail
from accelpatch.jit.prologue import kernarg_layout
from accelpatch.jit.types import Argument, argument

#: pointee of a HIP pointer -> dtype of the tensor that is passed; for others, such as void, any tensor is accepted
_POINTEES = MappingProxyType({
    "int": "int32", "int32_t": "int32", "float": "float32", "double": "float64", "half": "float16",
    "__half": "float16", "_Float16": "float16", "__bf16": "bfloat16", "bf16": "bfloat16",
    "__hip_bfloat16": "bfloat16", "hip_bfloat16": "bfloat16", "char": "int8", "int8_t": "int8", "uint8_t": "uint8",
    "unsigned char": "uint8", "short": "int16", "int16_t": "int16", "long": "int64", "int64_t": "int64",
    "unsigned": "uint32", "unsigned int": "uint32", "uint32_t": "uint32", "uint64_t": "uint64",
})  # fmt: skip
_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
_FORMATS = MappingProxyType({("i", 32): "i", ("u", 32): "I", ("f", 32): "f", ("i", 64): "q", ("u", 64): "Q",
                             ("f", 64): "d"})  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """names: of all parameters after J. arguments: those that a launch passes to the GPU."""

    name: str
    names: tuple[str, ...]
    arguments: tuple[Argument, ...]
    defaults: Mapping[str, object]

    @property
    def constants(self) -> tuple[str, ...]:
        """The compile-time parameters."""
        passed = {one.name for one in self.arguments}
        return tuple(name for name in self.names if name not in passed)

    def bound(self, names: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Values by name. Raises ArgumentError where one is missing, or there are too many."""
        values = dict(zip(names, given, strict=False))
        wrong = [name for name in named if name not in names or name in values]
        if len(given) > len(names) or wrong:
            extra = f", and {', '.join(wrong)} is none of them or given twice" if wrong else f", not {len(given)}"
            raise ArgumentError(f"{self.name} takes ({', '.join(names)}){extra}")
        values |= named
        missing = [name for name in names if name not in values and name not in self.defaults]
        if missing:
            raise ArgumentError(f"{self.name} takes ({', '.join(names)}): {', '.join(missing)} is missing")
        return {name: values.get(name, self.defaults.get(name)) for name in names}


def signature(function: Callable[..., Any]) -> Signature:
    """Parameters annotated with a string, their HIP type, are passed at run time; the others are compile-time."""
    parameters = list(inspect.signature(function).parameters.values())
    line = Line(function.__code__.co_filename, function.__code__.co_firstlineno)
    if function.__name__ in _YAML_WORDS:
        fail(
            f"{function.__name__} cannot name a kernel: YAML, in which a code object lists them, reads a truth value",
            line,
        )
    if not parameters:
        fail(f"{function.__name__} takes no J: the first parameter of a kernel is what it is built with", line)
    postponed = bool(function.__code__.co_flags & __future__.annotations.compiler_flag)
    found = []
    for one in parameters[1:]:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            fail(f"{one} is no parameter that a kernel can have: name each", line)
        hip = _annotation(one.annotation, postponed=postponed)
        if hip is not None:
            made = argument(one.name, hip)
            if made is None:
                fail(f'{one.name} has the type "{hip}": a kernel takes pointers, int, float and the like', line)
            found.append(made)
    defaults = {one.name: one.default for one in parameters[1:] if one.default is not one.empty}
    return Signature(function.__name__, tuple(one.name for one in parameters[1:]), tuple(found), defaults)


def _annotation(annotation: object, *, postponed: bool) -> str | None:
    """The string that a parameter is annotated with, else None. postponed: whether the module has ``from __future__
    import annotations``, which makes every annotation a string, and quotes strings a second time."""
    if not isinstance(annotation, str):
        return None
    if not postponed:
        return annotation
    try:
        inner = ast.literal_eval(annotation)
    except (ValueError, SyntaxError):
        return None
    return inner if isinstance(inner, str) else None


def address(one: Argument, value: Any, *, on_gpu: bool = False) -> int:
    """The address that is passed for a pointer: an integer as it is, or that of a tensor or an array.

    Raises ArgumentError for other values, and for tensors of another dtype.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if on_gpu and getattr(getattr(value, "device", None), "type", "cpu") == "cpu":
        raise ArgumentError(f"{one.name} lies in this machine's memory: move it to the GPU, or pass device='emulate'")
    wanted = _POINTEES.get(one.hip.rstrip("* "))
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not dtype:
        raise ArgumentError(f"{one.name} is {one.hip}: pass a tensor or its data_ptr(), not {type(value).__name__}")
    if wanted and dtype != wanted:
        raise ArgumentError(f"{one.name} is {one.hip}: pass a tensor of {wanted}, not of {dtype}")
    return int(value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data)


def number(one: Argument, value: Any) -> bytes:
    """The bytes of a number in the kernarg segment. Raises ArgumentError where it has another type, or does not fit."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer and not (isinstance(value, float) and one.type.is_float):
        raise ArgumentError(f"{one.name} is {one.hip}: pass a number of that type, not {value!r}")
    try:
        return struct.pack(f"<{_FORMATS[one.type.kind, one.type.bits]}", value)
    except (struct.error, OverflowError) as error:
        raise ArgumentError(f"{one.name} is {one.hip}, which {value} does not fit into") from error


def packed(arguments: Sequence[Argument], values: Mapping[str, Any]) -> bytes:
    """The kernarg segment for a launch on a GPU. Raises ArgumentError."""
    offsets, size = kernarg_layout(tuple(arguments))
    block = bytearray(size)
    for one, offset in zip(arguments, offsets, strict=True):
        value = values[one.name]
        data = address(one, value, on_gpu=True).to_bytes(8, "little") if one.pointer else number(one, value)
        block[offset : offset + len(data)] = data
    return bytes(block)
