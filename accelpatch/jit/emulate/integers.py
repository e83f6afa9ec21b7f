"""Access to scalar operands as Python integers: registers, constants, symbols, and the hardware's own values.

Types are u32, i32, u64 and i64.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from accelpatch.jit.emulate.operands import EXEC, VCC, VGPR, Operand
from accelpatch.jit.emulate.registry import Decoding
from accelpatch.jit.emulate.wave import ALL, Wave

IntegerReader = Callable[[Wave], int]
IntegerWriter = Callable[[Wave, int], None]

#: registers that a value of a type takes
WORDS = {"u32": 1, "i32": 1, "f32": 1, "u64": 2, "i64": 2, "f64": 2, "u16": 1, "i16": 1, "f16": 1}
FLOAT_BITS = {"f16": "<e", "f32": "<f", "f64": "<d"}
INLINE = (0.0, 0.5, 1.0, 2.0, 4.0, -0.5, -1.0, -2.0, -4.0)
INVERSE_TAU = 0.15915494309189532  # the inline constant 1/(2 pi), which has the exact bits of each type
# Where flat addresses mean LDS and private memory: beyond what a host process maps. The low 32 bits are the offset.
SHARED_APERTURE = 0x0001_0000 << 32
PRIVATE_APERTURE = 0x0002_0000 << 32


def constant(d: Decoding, operand: Operand, kind: str) -> int:
    """The bits of a constant in an operand of a type, as the hardware extends inline constants and literals."""
    size = WORDS[kind] * 32
    if operand.kind == "float":
        if kind in FLOAT_BITS:
            bits = int.from_bytes(struct.pack(FLOAT_BITS[kind], operand.number), "little")
            if kind == "f64" and operand.number not in INLINE and not _is_inverse_tau(operand):
                bits = bits >> 32 << 32  # a literal has the upper half alone
        elif size == 64:
            bits = int.from_bytes(struct.pack("<d", operand.number), "little")
        else:
            bits = int.from_bytes(struct.pack("<f" if kind != "u16" else "<e", operand.number), "little")
        return bits
    number = int(operand.number)
    if not -(1 << 31) <= number < 1 << 32 and size == 32:
        raise d.line.fault(f"{operand.text} does not fit in 32 bits")
    if size == 64 and not -16 <= number <= 64:
        low = number & 0xFFFFFFFF
        if kind == "f64":
            return low << 32
        return (low - (low >> 31 << 32)) & ALL if kind == "i64" else low
    return number & ((1 << size) - 1)


def _is_inverse_tau(operand: Operand) -> bool:
    return abs(operand.number - INVERSE_TAU) < 1e-7


def read_integer(d: Decoding, operand: Operand, kind: str = "u32") -> IntegerReader:
    """Reader of a scalar operand as a Python integer: u32, i32, u64 or i64."""
    words = WORDS[kind]
    sign = 1 << (32 * words - 1) if kind[0] == "i" else 0
    if operand.kind == "special":
        return _read_special(d, operand)
    if operand.kind == "expression":
        value = evaluate(d, operand.text)
        return lambda w: value
    if operand.kind != "register":
        bits = constant(d, operand, kind)
        value = (bits ^ sign) - sign
        return lambda w: value
    if operand.register >= VGPR:
        raise d.line.fault(f"{operand.text} is a vector register, and it takes a scalar one")
    if operand.count != words:
        raise d.line.fault(f"{operand.text} has {operand.count} registers, and must have {words}")
    r = d.reading(operand).register
    if words == 2:
        if sign:
            return lambda w: ((w.s[r] | w.s[r + 1] << 32) ^ sign) - sign
        return lambda w: w.s[r] | w.s[r + 1] << 32
    if sign:
        return lambda w: (w.s[r] ^ sign) - sign
    return lambda w: w.s[r]


def _read_special(d: Decoding, operand: Operand) -> IntegerReader:
    name = operand.text.removeprefix("src_")
    found: dict[str, IntegerReader] = {
        "scc": lambda w: w.scc,
        "vccz": lambda w: int(not (w.s[VCC] | w.s[VCC + 1])),
        "execz": lambda w: int(not w.exec),
        "shared_base": lambda w: SHARED_APERTURE,
        "private_base": lambda w: PRIVATE_APERTURE,
        "null": lambda w: 0,
    }
    if name not in found:
        raise d.line.fault(f"{operand.text} is no operand that it could read")
    return found[name]


def evaluate(d: Decoding, text: str) -> int:
    """A symbol, an integer, or half of the address of a constant (absolute: s_getpc_b64 gives 0 here)."""
    symbols = d.program.symbols
    found = re.fullmatch(r"(\S+)@rel32@(lo|hi)\s*\+\s*\d+", text)
    if found and found[1] in d.program.addresses:
        address = d.program.addresses[found[1]]
        return address & 0xFFFFFFFF if found[2] == "lo" else address >> 32
    if text in symbols:
        return evaluate(d, symbols[text])
    try:
        return int(text, 0)
    except ValueError:
        raise d.line.fault(f"the emulator cannot evaluate {text!r}") from None


def write_integer(d: Decoding, operand: Operand, words: int = 1) -> IntegerWriter:
    """Writer of a scalar register, or of a pair; the value is cut to its bits."""
    if operand.text == "null":
        return lambda w, value: None
    if operand.count != words:
        raise d.line.fault(f"{operand.text} has {operand.count} registers, and must have {words}")
    r = d.writing(operand).register
    if r >= VGPR:
        raise d.line.fault(f"{operand.text} is a vector register, and it writes a scalar one")
    if r + words > EXEC:
        if words == 2:
            return lambda w, value: w.set_exec(value & ALL)
        return lambda w, value: w.set_scalar(r, value & 0xFFFFFFFF)
    if words == 1:

        def write_word(w: Wave, value: int) -> None:
            w.s[r] = value & 0xFFFFFFFF

        return write_word

    def write_pair(w: Wave, value: int) -> None:
        w.s[r], w.s[r + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF

    return write_pair
