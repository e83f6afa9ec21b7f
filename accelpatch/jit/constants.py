"""Constants as bits and as operands: some are inline constants of an instruction, others need a 32-bit literal."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType

from accelpatch.jit.expressions import Constant
from accelpatch.jit.types import Type

#: bits of a float that is an inline constant -> how assembly writes it
_INLINE = {
    "f32": {0x3F000000: "0.5", 0x3F800000: "1.0", 0x40000000: "2.0", 0x40800000: "4.0", 0xBF000000: "-0.5",
            0xBF800000: "-1.0", 0xC0000000: "-2.0", 0xC0800000: "-4.0", 0x3E22F983: "0.15915494"},
    # the high 32 bits; the low ones are zero
    "f64": {0x3FE00000: "0.5", 0x3FF00000: "1.0", 0x40000000: "2.0", 0x40100000: "4.0", 0xBFE00000: "-0.5",
            0xBFF00000: "-1.0", 0xC0000000: "-2.0", 0xC0100000: "-4.0"},
    "f16": {0x3800: "0.5", 0x3C00: "1.0", 0x4000: "2.0", 0x4400: "4.0", 0xB800: "-0.5", 0xBC00: "-1.0",
            0xC000: "-2.0", 0xC400: "-4.0"},
}  # fmt: skip
INLINE: Mapping[str, Mapping[int, str]] = MappingProxyType(_INLINE)
_NONE: Mapping[int, str] = MappingProxyType({})


def bfloat16(value: float) -> int:
    """The bits of a number rounded to bfloat16, to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def bits_of(value: float, dtype: Type) -> int:
    """The bits of a number as an element of a type; in a packed type it is repeated in every part."""
    if dtype.kind == "bf":
        lane = bfloat16(value)
    elif dtype.kind == "f":
        code = {16: "e", 32: "f", 64: "d"}[dtype.bits]
        lane = int.from_bytes(struct.pack(f"<{code}", value), "little")
    else:
        lane = int(value) & ((1 << dtype.bits) - 1)
    return sum(lane << (dtype.bits * at) for at in range(dtype.lanes))


def is_inline(bits: int, dtype: Type) -> bool:
    """Whether these 32 bits are an inline constant for an operand of this type."""
    signed = bits - (1 << 32) if bits >> 31 else bits
    return -16 <= signed <= 64 or bits in INLINE.get(str(dtype), _NONE)


def text(bits: int, dtype: Type) -> str:
    """How assembly writes 32 bits as an operand of a type."""
    signed = bits - (1 << 32) if bits >> 31 else bits
    if -16 <= signed <= 64:
        return str(signed)
    return INLINE.get(str(dtype), _NONE).get(bits, f"{bits:#x}")


def words(constant: Constant, dwords: int | None = None) -> list[int]:
    """The 32-bit words of a constant, lowest first."""
    bits = bits_of(constant.value, constant.type)
    return [(bits >> (32 * at)) & 0xFFFFFFFF for at in range(dwords or constant.type.dwords)]


def inline_text(constant: Constant) -> str | None:
    """How assembly writes an inline constant, None for a number that needs a literal."""
    low, *high = words(constant)
    if constant.type.lanes > 1:
        return None  # packed instructions use an inline constant for the low half only
    if high and constant.type.is_float:
        return INLINE["f64"].get(high[0]) if low == 0 and high[0] else "0" if low == high[0] else None
    if high and high[0] != (0xFFFFFFFF if low >> 31 else 0):
        return None
    return text(low, constant.type) if is_inline(low, constant.type) else None
