"""8-bit floats: e4m3 and e5m2, in the fnuz form of gfx942 and the OCP form of gfx950; their conversions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from accelpatch.jit.emulate.floats import F32, F64
from accelpatch.jit.emulate.operands import VGPR
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.values import read, write
from accelpatch.jit.emulate.wave import Array, Wave

ARCHS = "gfx942 gfx950"


@dataclass(frozen=True)
class Small:
    """mantissa: bits. fnuz: no infinity, one NaN at 0x80, no -0. infinite: has an infinity."""

    mantissa: int
    bias: int
    fnuz: bool
    infinite: bool

    @property
    def table(self) -> Array:
        return _table(self)

    def decode(self, codes: Array) -> Array:
        """float64 of uint8."""
        return self.table[codes]

    def encode(self, a: Array) -> Array:
        """uint8 of float32, to nearest even; beyond the largest: infinity or NaN, as the instructions have it."""
        finite = self.table[:128][np.isfinite(self.table[:128])]
        magnitude = np.abs(a.astype(F64))
        place = np.clip(np.searchsorted(finite, magnitude), 1, len(finite) - 1)
        below, above = finite[place - 1], finite[place]
        middle = (below + above) / 2
        up = (magnitude > middle) | (magnitude == middle) & (place % 2 == 0)
        code = np.where(up, place, place - 1).astype(np.int64)
        step = finite[-1] - finite[-2]
        over = ~(magnitude < finite[-1] + step / 2)  # NaN too
        special = 0x80 if self.fnuz else 0x7F
        code = np.where(over, 0x7C if self.infinite else special, code)
        code = np.where(np.isnan(a), 0x7F if self.infinite else special, code)
        sign = np.where(np.signbit(a), 0x80, 0)
        return np.where(self.fnuz & ((code == 0) | (code == 0x80)), code, code | sign).astype(np.uint8)


@cache
def _table(f: Small) -> Array:
    values = np.empty(256, F64)
    for code in range(256):
        exponent, mantissa = code >> f.mantissa & (0x7F >> f.mantissa), code & (1 << f.mantissa) - 1
        scale = 2.0 ** (max(exponent, 1) - f.bias - f.mantissa)
        value = (mantissa + ((1 << f.mantissa) if exponent else 0)) * scale
        values[code] = -value if code & 0x80 else value
    if f.fnuz:
        values[0x80] = np.nan
    elif f.infinite:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    else:
        values[[0x7F, 0xFF]] = np.nan
    return values


FORMS = {
    ("fp8", "gfx942"): Small(3, 8, True, False),
    ("bf8", "gfx942"): Small(2, 16, True, False),
    ("fp8", "gfx950"): Small(3, 7, False, False),
    ("bf8", "gfx950"): Small(2, 15, False, True),
}


def to_float(name: str, d: Decoding) -> Step:
    """v_cvt_f32_fp8: of the byte that src0_sel says, the lowest otherwise."""
    form, destination = FORMS[name, d.arch], d.operand()
    made, store = read(d, d.operand(), "u32", 0), write(d, destination, "f32")
    return lambda w: store(w, form.decode((made(w) & np.uint32(255)).astype(np.uint8)).astype(F32))


def to_float_pair(name: str, d: Decoding) -> Step:
    form, destination = FORMS[name, d.arch], d.operand()
    high = 16 * d.bits("op_sel", [0])[0]
    made, store = read(d, d.operand(), "u32", 0), write(d, destination, "u64")

    def execute(w: Wave) -> None:
        codes = np.broadcast_to(made(w) >> np.uint32(high), 64)
        pair = np.stack([codes & np.uint32(255), codes >> np.uint32(8) & np.uint32(255)], axis=1)
        store(w, form.decode(pair.astype(np.uint8)).astype(F32).view(np.uint64)[:, 0])

    return execute


def from_pair(name: str, d: Decoding) -> Step:
    """v_cvt_pk_fp8_f32: two bytes into the half that op_sel's last bit says, the other kept."""
    form, destination = FORMS[name, d.arch], d.operand()
    a, b = read(d, d.operand(), "f32"), read(d, d.operand(), "f32")
    store = write(d, destination, "u16", preserve=True, sources=2)

    def execute(w: Wave) -> None:
        store(w, form.encode(a(w)).astype(np.uint16) | form.encode(b(w)).astype(np.uint16) << np.uint16(8))

    return execute


def stochastic(name: str, d: Decoding) -> Step:
    """v_cvt_sr_fp8_f32: the second source's upper 20 bits are added to the mantissa; op_sel's last two: the byte."""
    form, destination = FORMS[name, d.arch], d.operand()
    a, noise = read(d, d.operand(), "u32"), read(d, d.operand(), "u32")
    row, bits = d.writing(destination).register - VGPR, d.bits("op_sel", [0] * 4)
    shift = np.uint32(8 * (bits[2] + 2 * bits[3]))

    def execute(w: Wave) -> None:
        value = a(w)
        mantissa = (value + (noise(w) >> np.uint32(12))) & np.uint32(0x7FFFFF)
        code = form.encode((value & np.uint32(0xFF800000) | mantissa).view(F32)).astype(np.uint32)
        np.copyto(w.u32[row], w.u32[row] & ~(np.uint32(255) << shift) | code << shift, where=w.mask)

    return execute


for _name in ("fp8", "bf8"):
    add(f"v_cvt_f32_{_name}", partial(to_float, _name), ARCHS)
    add(f"v_cvt_pk_f32_{_name}", partial(to_float_pair, _name), ARCHS)
    add(f"v_cvt_pk_{_name}_f32", partial(from_pair, _name), ARCHS)
    add(f"v_cvt_sr_{_name}_f32", partial(stochastic, _name), ARCHS)
