"""Lossless 12-bit bf16 weights in the tile layout of the HIP kernels; packing and unpacking are exact.

Sign and 7 mantissa bits are kept as they are. Nearly all exponents of a row lie in a window of 16 consecutive values
and take 4 bits. A value outside the window is an *outlier*: kept whole, with its column, in a table of its own.
Variable-length codes of exponents: Zhang et al. 2025, "70% Size, 100% Accuracy", arXiv:2504.11651. This code has a
fixed length, so that two values take three to four instructions on their way into the matrix unit.

The layout of a tile is described at `Compact` in hip/gemv/formats.h. The rows of gate and up can be interleaved
(tiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.exponent_windows import WINDOW, outside_of, windows
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.layouts.tiled import Tiled
from accelpatch.kernels.layouts.tiling import TILE_ROWS

STEP, STEP_BYTES = 64, 1536  # values of K per tile, and bytes per tile
PLAIN_BYTES = 1024  # bytes of signs and mantissas in a tile; exponents follow
BIAS = 127
NONE = -1  # an unused outlier entry
FOUR = 4  # outliers per read
VALUES_PER_OUTLIER = 32  # at most 1 / 32 of a row's values may be outliers
LARGEST_K = 0xFFFE  # an outlier's column is below this
BLOCK = 1 << 24  # values encoded at once
SHIFTS = (7, 23, 11, 27, 3, 19)  # bit positions of six of a word's eight exponents; two wrap around the ends


@dataclass(frozen=True, eq=False)
class CompactTiles(Tiled):
    """w[tiles, steps, 1536] uint8, scale[tiles, 16] float32, outliers[tiles, 16, E] int32 of a weight[n, k].

    scale: a power of two per row, or 0. outliers: the column in the lower 16 bits, the value's bits in the upper 16, or
    NONE; a row's outliers come first, sorted by column. part: as in tiled.py.
    """

    w: Tensor
    scale: Tensor
    outliers: Tensor
    n: int
    k: int
    part: str = "all"
    order: None = None

    def arguments(self) -> tuple[Any, ...]:
        """What `compact_linear` takes between x and the bias."""
        return self.w, self.scale, self.outliers, self.n, self.k, self.part

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return CompactTiles, self.k

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        """12-bit weights need bfloat16."""
        return None if dtype == torch.bfloat16 else f"its activations are {dtype}, and 12-bit weights need bfloat16"

    def canonical(self) -> Plain:
        """The weight that it was made of."""
        return Plain(self.unpack())

    @classmethod
    def pack(cls, weight: Tensor) -> CompactTiles:
        """From weight[N, K] bfloat16. Raises KernelError for too many outliers in a row or values that do not fit."""
        n, k = weight.shape
        if reason := unfit(k, weight.dtype) or ("it has no rows" if n < 1 else None):
            raise KernelError(reason)
        rows = max(TILE_ROWS, BLOCK // k // TILE_ROWS * TILE_ROWS)
        blocks = [_of_rows(_padded_tiles(block)) for block in weight.detach().split(rows)]
        width = max(outliers.shape[1] for _, _, outliers in blocks)
        return cls(
            torch.cat([w for w, _, _ in blocks]),
            torch.cat([scale for _, scale, _ in blocks]).view(-1, TILE_ROWS),
            torch.cat([_widened(outliers, width) for _, _, outliers in blocks]).view(-1, TILE_ROWS, width),
            n,
            k,
        )

    def unpack(self) -> Tensor:
        """weight[N, K] bfloat16; the inverse of `pack`."""
        w, scale, outliers, n, k, _ = self.alone().arguments()
        steps = w.shape[1]
        first, second, third, fourth = w[..., :PLAIN_BYTES].reshape(-1, steps, 2, 8, 4, 4, 4).unbind(-1)
        order = [first & 127 | second & 128, third & 127 | fourth & 128, second & 127 | first & 128]
        plain = torch.stack([*order, fourth & 127 | third & 128], -1)
        code_bytes = w[..., PLAIN_BYTES:].reshape(-1, steps, 8, 4, 2, 8).permute(0, 1, 4, 2, 3, 5)
        words = code_bytes.contiguous().view(torch.int32)
        last = [(words & 7) << 1 | words >> 31 & 1, words >> 15 & 15]
        codes = torch.stack([*(words >> shift & 15 for shift in SHIFTS), *last], -1)

        def rows(values: Tensor) -> Tensor:
            return values.movedim(1, 3).reshape(-1, steps * STEP)[:n, :k]

        scales = scale.to(torch.float32).flatten()[:n].unsqueeze(1)  # scale is float64 within a float64 reference
        low = (scales.view(torch.int32) >> 23) - (WINDOW - 1)  # the exponent of a power of two
        kept = rows(plain).to(torch.int32)
        sign, rest = (kept & 0x80) << 8, (rows(codes.flatten(4)) + low) << 7 | kept & 0x7F
        bits = torch.where(scales == 0, sign, sign | rest).to(torch.int16)
        row, place = (outliers.flatten(0, 1)[:n] != NONE).nonzero(as_tuple=True)
        found = outliers.flatten(0, 1)[row, place]
        bits[row, found & 0xFFFF] = (found >> 16).to(torch.int16)
        return bits.view(torch.bfloat16)

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv_compact or unpack_compact."""
        w, scale, outliers = self.w.contiguous(), self.scale.contiguous(), self.outliers.contiguous()
        prefetchable = w is self.w and scale is self.scale and outliers is self.outliers
        fours = outliers.shape[2] // FOUR
        return WeightArguments(
            "gemv_compact", self.rows, self.k, w, None, scale, outliers, group_shift=fours, prefetchable=prefetchable
        )

    @staticmethod
    def alike(parts: list[CompactTiles]) -> list[CompactTiles]:  # type: ignore[override]
        """The same tiles, all with the same number of outlier entries per row."""
        width = max(one.outliers.shape[2] for one in parts)
        return [one.replace(outliers=_widened(one.outliers, width)) for one in parts]

    @staticmethod
    def eights(table: Tensor) -> Tensor:
        """As of all tiles; for w, scale and outliers."""
        if table.dtype != torch.uint8:
            return table.unflatten(1, (2, -1))
        plain, codes = table.split([PLAIN_BYTES, STEP_BYTES - PLAIN_BYTES], -1)
        halves = codes.unflatten(2, (-1, 2, 8)).movedim(3, 1).flatten(3)  # tile, half, step, 32 lanes by 8 bytes
        return torch.cat([plain.unflatten(2, (2, -1)).movedim(2, 1), halves], -1)

    @staticmethod
    def of_eights(table: Tensor) -> Tensor:
        """As of all tiles."""
        if table.dtype != torch.uint8:
            return table.flatten(1, 2).contiguous()
        plain, code_bytes = table.split([PLAIN_BYTES // 2, (STEP_BYTES - PLAIN_BYTES) // 2], -1)
        codes = code_bytes.unflatten(3, (-1, 8)).movedim(1, 3).flatten(2)
        return torch.cat([plain.movedim(1, 2).flatten(2), codes], -1)


def unfit(k: int, dtype: torch.dtype) -> str | None:
    """Why no weight[N, k] of `dtype` can be packed; None where it depends on its values."""
    if dtype != torch.bfloat16:
        return f"only bfloat16 can be packed in 12 bits, not {dtype}"
    return None if 1 <= k <= LARGEST_K else f"K = {k} is not between 1 and {LARGEST_K}"


def allowed(k: int) -> int:
    """Maximum number of outliers per row of K values."""
    return max(FOUR, k // VALUES_PER_OUTLIER)


def _padded_tiles(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % TILE_ROWS
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _widened(outliers: Tensor, width: int) -> Tensor:
    missing = width - outliers.shape[-1]
    return torch.nn.functional.pad(outliers, (0, missing), value=NONE) if missing else outliers


def _of_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(w[tiles, steps, 1536], scale[rows], outliers[rows, E]) of rows that fill whole tiles."""
    bits = weight.view(torch.int16)
    exponents = ((bits >> 7) & 255).to(torch.uint8)
    if bool((exponents == 255).any()):
        raise KernelError("a weight with NaN or infinity cannot be packed in 12 bits")
    empty = (bits & 0x7FFF).amax(1, keepdim=True) == 0
    low = windows(exponents, empty, allowed(bits.shape[1]))
    outside = outside_of(low, exponents) & ~empty
    codes = torch.where(outside | empty, low, exponents) - low
    kept = torch.where(outside, bits.new_zeros(()), bits)
    plain = ((kept >> 8) & 0x80 | kept & 0x7F).to(torch.uint8)
    top = low.to(torch.float64) + (WINDOW - 1 - BIAS)
    scale = torch.where(empty, 0.0, torch.exp2(top)).to(torch.float32)
    return _tiles(codes, plain), scale.squeeze(1), _outliers(outside, bits)


def _outliers(outside: Tensor, bits: Tensor) -> Tensor:
    counts = outside.sum(1)
    most = int(counts.amax())
    if most > allowed(bits.shape[1]):
        raise KernelError(
            f"{most} of {bits.shape[1]} values of a row lie outside of the {WINDOW} binades that 4 bits distinguish, "
            f"and {allowed(bits.shape[1])} may"
        )
    row, column = outside.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=bits.device) - (counts.cumsum(0) - counts)[row]
    width = max(FOUR, -(-most // FOUR) * FOUR)
    found = torch.full((len(bits), width), NONE, dtype=torch.int32, device=bits.device)
    found[row, place] = column.to(torch.int32) | bits[row, column].to(torch.int32) << 16
    return found


def _tiles(codes: Tensor, plain: Tensor) -> Tensor:
    """Codes and plain bits, each [rows, K] uint8 -> [tiles, steps, 1536]."""
    missing = -codes.shape[1] % STEP
    steps = (codes.shape[1] + missing) // STEP

    def parts(values: Tensor, *last: int) -> Tensor:  # tile, step, half of the rows, r, t, ...
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return padded.view(-1, 2, 8, steps, 4, *last).movedim(3, 1)

    # Of a word: its bytes have the mantissas of a, b, c, d, each with the sign of another value.
    a, c, b, d = parts(plain, 4, 4).unbind(-1)
    words = torch.stack([a & 127 | b & 128, b & 127 | a & 128, c & 127 | d & 128, d & 127 | c & 128], -1)
    e = parts(codes, 2, 8).to(torch.int32).unbind(-1)
    exponents = e[6] >> 1 | (e[6] & 1) << 31 | e[7] << 15
    for one, shift in zip(e, SHIFTS, strict=False):
        exponents = exponents | one << shift
    code_bytes = exponents.view(torch.uint8).permute(0, 1, 3, 4, 2, 5)  # tile, step, r, t, half, 8 bytes
    return torch.cat([words.flatten(2), code_bytes.flatten(2)], -1)
