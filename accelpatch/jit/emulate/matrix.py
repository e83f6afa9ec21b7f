"""Matrix instructions (MFMA): D = A B + C, one or more blocks at once, over all lanes whatever exec says.

Layouts are those of AMD's matrix instruction calculator. A lane holds, of row i of A (column j of B), a few successive
k: lane = i + M (block + blocks (k / values)). D's rows lie in fours: register 4 g + r of lane group l has row r of the
fours, which are numbered by g and l, block after block. The order in which the hardware adds is not published: here a
sum is exact to double precision and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from accelpatch.jit.emulate.dot import flushed_half
from accelpatch.jit.emulate.floats import F16, F32, F64, bf16_to_f32, flushed
from accelpatch.jit.emulate.integers import constant
from accelpatch.jit.emulate.operands import Operand
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.small_floats import FORMS
from accelpatch.jit.emulate.vector import row_of
from accelpatch.jit.emulate.wave import Array, Wave

LANE = np.arange(64)
BYTES = {"f64": 8, "f32": 4, "xf32": 4, "f16": 2, "bf16": 2, "i8": 1, "fp8": 1, "bf8": 1}
NAME = re.compile(
    r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(?:\d+b_)?((?:f64|f32|xf32|f16|bf16|i8|fp8|bf8)(?:_\w+8)?)(_1k)?"
)
OLD = """f32_32x32x1f32 f32_16x16x1f32 f32_4x4x1f32 f32_32x32x2f32 f32_16x16x4f32 f32_32x32x4f16 f32_16x16x4f16
f32_4x4x4f16 f32_32x32x8f16 f32_16x16x16f16 f32_32x32x4bf16_1k f32_16x16x4bf16_1k f32_4x4x4bf16_1k f32_32x32x8bf16_1k
f32_16x16x16bf16_1k i32_32x32x4i8 i32_16x16x4i8 i32_4x4x4i8 f64_16x16x4f64 f64_4x4x4f64"""
ONLY_90A = """f32_32x32x2bf16 f32_16x16x2bf16 f32_4x4x2bf16 f32_32x32x4bf16 f32_16x16x8bf16 i32_32x32x8i8
i32_16x16x16i8"""
NEW = """f32_32x32x1_2b_f32 f32_16x16x1_4b_f32 f32_4x4x1_16b_f32 f32_32x32x2_f32 f32_16x16x4_f32 f32_32x32x4_2b_f16
f32_16x16x4_4b_f16 f32_4x4x4_16b_f16 f32_32x32x8_f16 f32_16x16x16_f16 f32_32x32x4_2b_bf16 f32_16x16x4_4b_bf16
f32_4x4x4_16b_bf16 f32_32x32x8_bf16 f32_16x16x16_bf16 i32_32x32x4_2b_i8 i32_16x16x4_4b_i8 i32_4x4x4_16b_i8
i32_32x32x16_i8 i32_16x16x32_i8 f64_16x16x4_f64 f64_4x4x4_4b_f64 f32_16x16x32_fp8_fp8 f32_16x16x32_fp8_bf8
f32_16x16x32_bf8_fp8 f32_16x16x32_bf8_bf8 f32_32x32x16_fp8_fp8 f32_32x32x16_fp8_bf8 f32_32x32x16_bf8_fp8
f32_32x32x16_bf8_bf8 i32_32x32x16i8 i32_16x16x32i8"""
ONLY_942 = "f32_16x16x8_xf32 f32_32x32x4_xf32"
ONLY_950 = "f32_16x16x32_f16 f32_16x16x32_bf16 f32_32x32x16_f16 f32_32x32x16_bf16 i32_16x16x64_i8 i32_32x32x32_i8"


@dataclass(frozen=True)
class Shape:
    """values: of K that a lane holds of A and B. kinds: of A and of B."""

    m: int
    k: int
    blocks: int
    values: int
    result: str
    kinds: tuple[str, str]

    @property
    def words(self) -> int:
        """Registers of A and of B."""
        return self.values * BYTES[self.kinds[0]] // 4

    @property
    def results(self) -> int:
        """Registers of C and of D."""
        return self.m * self.m * self.blocks // 64 * (2 if self.result == "f64" else 1)


def shape_of(name: str, words: int) -> Shape:
    """A mnemonic's shape; blocks follow from how many registers A has."""
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no matrix instruction")
    result, m, _, k, kinds, _ = found.groups()
    a, _, b = kinds.partition("_")
    values = 4 * words // BYTES[a]
    return Shape(int(m), int(k), max(1, values * 64 // (int(m) * int(k))), values, result, (a, b or a))


@cache
def input_places(m: int, k: int, blocks: int, values: int) -> tuple[Array, Array]:
    """Lane and value, [blocks, m, k], of an element of A (or, with columns as rows, of B)."""
    block, i, at = np.ogrid[:blocks, :m, :k]
    lane = i + m * (block + blocks * (at // values))
    return lane, np.broadcast_to(at % values, lane.shape)


@cache
def output_places(m: int, blocks: int, double: bool) -> tuple[Array, Array]:
    """Value and lane, [blocks, m, m], of an element of C and D."""
    block, i, j = np.ogrid[:blocks, :m, :m]
    groups = 64 // m  # of lanes that hold whole rows
    if double:
        number = i * blocks + block
        return np.broadcast_to(number // groups, (blocks, m, m)), number % groups * m + j
    number = block * (m // 4) + i // 4  # of the four rows
    return np.broadcast_to(number // groups * 4 + i % 4, (blocks, m, m)), number % groups * m + j


def decoded(kind: str, arch: str, words: Array) -> Array:
    """uint32[64, n] as float64 or int64[64, values]."""
    if kind == "f64":
        return words.view(F64)
    if kind == "i8":
        return words.view(np.int8).astype(np.int64)
    if kind in ("fp8", "bf8"):
        return FORMS[kind, arch].decode(words.view(np.uint8))
    if kind == "f16":
        halves = words.view(F16)
        return (flushed_half(halves) if arch == "gfx90a" else halves).astype(F64)
    if kind == "bf16":
        floats = bf16_to_f32(words.view(np.uint16))
        return (flushed(floats) if arch == "gfx90a" else floats).astype(F64)
    if kind == "xf32":
        words = words & np.uint32(0xFFFFE000)  # ten bits of mantissa
    return words.view(F32).astype(F64)


def lanes_of_b(blgp: int) -> Array:
    """The lane whose B each lane takes."""
    sources = {0: LANE, 1: LANE % 32, 2: LANE % 32 + 32, 3: (LANE + 16) % 64}
    return sources[blgp] if blgp in sources else LANE % 16 + 16 * (blgp - 4)


def build(d: Decoding) -> Step:
    destination, a, b, c = (d.operand() for _ in range(4))
    shape = shape_of(d.mnemonic, a.count)
    rows = [row_of(d, d.reading(one), shape.words) for one in (a, b)]
    into = row_of(d, d.writing(destination), shape.results)
    d.whole = True
    cbsz, abid, blgp = d.number("cbsz"), d.number("abid"), d.number("blgp")
    if blgp and shape.result == "f64":
        raise d.line.fault("the emulator does not know blgp, which negates here")
    addend = addend_of(d, c, shape)
    lane, value = input_places(shape.m, shape.k, shape.blocks, shape.values)
    places = output_places(shape.m, shape.blocks, shape.result == "f64")
    source = np.arange(shape.blocks) & ~((1 << cbsz) - 1) | abid
    lane_a, lane_b = lane[source], lanes_of_b(blgp)[lane]
    arch, flushes = d.arch, d.arch == "gfx90a" and shape.kinds[0] in ("f16", "bf16")

    def execute(w: Wave) -> None:
        x, y = (
            decoded(kind, arch, np.ascontiguousarray(w.u32[row : row + shape.words].T))
            for kind, row in zip(shape.kinds, rows, strict=True)
        )
        total = x[lane_a, value] @ y[lane_b, value].transpose(0, 2, 1) + addend(w, places)
        put_result(w, into, shape, places, flushed(total.astype(F32)) if flushes else total)

    return execute


def addend_of(d: Decoding, operand: Operand, shape: Shape) -> Callable[[Wave, tuple[Array, Array]], Array]:
    """C as [blocks, m, m], or a constant."""
    dtype = {"f32": F32, "i32": np.int32, "f64": F64}[shape.result]
    if operand.kind != "register":
        fixed: Array = np.array([constant(d, operand, shape.result)], f"u{np.dtype(dtype).itemsize}").view(dtype)
        return lambda w, places: fixed.astype(F64 if shape.result != "i32" else np.int64)
    row = row_of(d, d.reading(operand), shape.results)
    wide = np.int64 if shape.result == "i32" else F64

    def read(w: Wave, places: tuple[Array, Array]) -> Array:
        words = np.ascontiguousarray(w.u32[row : row + shape.results].T).view(dtype)
        return words[places[1], places[0]].astype(wide)

    return read


def put_result(w: Wave, into: int, shape: Shape, places: tuple[Array, Array], total: Array) -> None:
    dtype = {"f32": F32, "i32": np.int32, "f64": F64}[shape.result]
    per_lane = np.empty((64, shape.m * shape.m * shape.blocks // 64), dtype)
    per_lane[places[1], places[0]] = total.astype(dtype)
    w.u32[into : into + shape.results] = per_lane.view(np.uint32).T


for _names, _archs in (
    (OLD, ""),
    (ONLY_90A, "gfx90a"),
    (NEW, "gfx942 gfx950"),
    (ONLY_942, "gfx942"),
    (ONLY_950, "gfx950"),
):
    for _name in _names.split():
        add(f"v_mfma_{_name}", build, _archs)
