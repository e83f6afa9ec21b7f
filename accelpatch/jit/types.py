"""Types of register elements, ``f32``, ``u64``, ``bf16x2``, and of HIP arguments, ``int*``, ``float``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from accelpatch.jit.location import fail

FILES = MappingProxyType({"s": "scalar", "v": "vector", "a": "accumulator"})


@dataclass(frozen=True)
class Type:
    """The type of an element. kind: i (signed), u, f or bf (bfloat16). bits: of one number. lanes: how many numbers are
    packed into the element, as in bf16x2."""

    kind: str
    bits: int
    lanes: int = 1

    @property
    def dwords(self) -> int:
        return -(-self.bits * self.lanes // 32)

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf")

    @property
    def is_integer(self) -> bool:
        """Whether arithmetic treats it as an integer: packed and narrower types need instructions by name."""
        return self.kind in ("i", "u") and self.lanes == 1 and self.bits >= 32

    def __str__(self) -> str:
        return f"{self.kind}{self.bits}" + (f"x{self.lanes}" if self.lanes > 1 else "")


I32, U32, U64, F32, B1 = Type("i", 32), Type("u", 32), Type("u", 64), Type("f", 32), Type("u", 1)
_KNOWN = frozenset((
    "i32", "u32", "i64", "u64", "f64", "f32", "f16", "bf16", "i16", "u16", "i8", "u8", "i16x2", "u16x2", "f16x2",
    "bf16x2", "i8x4", "u8x4",
))  # fmt: skip


@functools.cache
def _parsed(text: str) -> Type | None:
    found = re.fullmatch(r"(i|u|f|bf)(\d+)(?:x(\d+))?", text)
    return Type(found[1], int(found[2]), int(found[3] or 1)) if found and text in _KNOWN else None


def element(text: str) -> Type:
    """The type of a name such as "f32" or "bf16x2". Raises CompileError where there is no such type."""
    found = _parsed(text)
    if found is None:
        fail(f"{text!r} is no type of a register: use one of {', '.join(sorted(_KNOWN))}")
    return found


def register(text: str) -> tuple[str, Type]:
    """The register file and the element type of a name such as "vf32": v for vector, s for scalar, a for
    accumulator."""
    if text[:1] not in FILES:
        fail(f"{text!r} is no type of a register: begin with s, v or a, as in si32, vf32, abf16x2")
    return text[0], element(text[1:])


@dataclass(frozen=True)
class Argument:
    """A run-time argument. hip: its HIP type. type: as registers hold it. bytes: its size in the kernarg segment."""

    name: str
    hip: str
    type: Type
    bytes: int
    pointer: bool

    @property
    def kind(self) -> str:
        """Its value_kind in the code object's metadata."""
        return "global_buffer" if self.pointer else "by_value"


#: HIP type -> register type
_HIP: Mapping[str, Type] = MappingProxyType({
    "int": I32, "int32_t": I32, "unsigned": U32, "unsigned int": U32, "uint": U32, "uint32_t": U32, "float": F32,
    "long": Type("i", 64), "long long": Type("i", 64), "int64_t": Type("i", 64), "size_t": U64, "uint64_t": U64,
    "unsigned long": U64, "unsigned long long": U64, "double": Type("f", 64),
})  # fmt: skip


def argument(name: str, hip: str) -> Argument | None:
    """The run-time argument of a HIP type, None where a kernel cannot have it."""
    text = re.sub(r"\b(const|restrict|__restrict__|volatile)\b", "", hip).strip()
    text = re.sub(r"\s+", " ", text)
    if text.endswith("*"):
        return Argument(name, text, U64, 8, True)
    found = _HIP.get(text)
    return None if found is None else Argument(name, text, found, 4 * found.dwords, False)
