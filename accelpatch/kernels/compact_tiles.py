"""A bfloat16 weight in 12 bits a value without loss, in the tiles that the HIP kernels read; both ways exact.

A sign and seven bits of mantissa stay as they are. Of a row's exponents nearly all lie in a window of 16 neighbouring
binades, and take 4 bits. What lies outside of it is an *outlier*: kept whole, with its place in the row, beside the
tiles. Exponents by a code of variable length: Zhang et al. 2025, "70% Size, 100% Accuracy", arXiv:2504.11651. This one
has a fixed length, so that two values take three to four instructions on their way into the matrix unit.

The layout of a tile stands beside `Compact` in hip/formats.h. The rows of a gate and of its `up` can lie `paired`, as
those of int4_tiles.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.hip.layout import TILE_ROWS

STEP, STEP_BYTES = 64, 1536  # values of K of a tile, and their bytes
PLAIN_BYTES = 1024  # of signs and mantissas; exponents follow
WINDOW = 16  # exponents that have a code
BIAS = 127
NONE = -1  # no outlier
FOUR = 4  # outliers are read so many at a time
VALUES_PER_OUTLIER = 32  # one of so many values of a row at most is an outlier
LARGEST_K = 0xFFFE  # the last column that an outlier can name is one less
TRIED = 6  # windows of a row: from its largest exponent down
BLOCK = 1 << 24  # values encoded at once
SHIFTS = (7, 23, 11, 27, 3, 19)  # of the first six exponents of eight; the last two lie around the word's ends


class CompactTiles(NamedTuple):
    """w[tiles, steps, 1536] uint8, scale[tiles, 16] float32, outliers[tiles, 16, E] int32 of a weight[n, k].

    scale: of each row a power of two, or 0. An outlier is its column in the lower half of a word and its bits in the
    upper one, or NONE; those of a row come first in it, by column. part: as of int4_tiles.Tiles.
    """

    w: Tensor
    scale: Tensor
    outliers: Tensor
    n: int
    k: int
    part: str = "all"

    @property
    def rows(self) -> int:
        """Rows that the tiles hold."""
        return self.n if self.part in ("all", "both") else 2 * self.n


def unfit(k: int, dtype: torch.dtype) -> str | None:
    """Why no weight[N, k] of `dtype` has tiles; None where one may have them, which its values decide."""
    if dtype != torch.bfloat16:
        return f"only bfloat16 has a form of 12 bits, not {dtype}"
    return None if 1 <= k <= LARGEST_K else f"K = {k} is no number from 1 to {LARGEST_K}"


def allowed(k: int) -> int:
    """Outliers that a row of K values may have."""
    return max(FOUR, k // VALUES_PER_OUTLIER)


def encode(weight: Tensor) -> CompactTiles:
    """The tiles of weight[N, K] bfloat16. Raises KernelError for values that they cannot hold."""
    n, k = weight.shape
    if reason := unfit(k, weight.dtype) or ("it has no rows" if n < 1 else None):
        raise KernelError(reason)
    rows = max(TILE_ROWS, BLOCK // k // TILE_ROWS * TILE_ROWS)
    blocks = [_of_rows(_padded_tiles(block)) for block in weight.detach().split(rows)]
    width = max(outliers.shape[1] for _, _, outliers in blocks)
    return CompactTiles(
        torch.cat([w for w, _, _ in blocks]),
        torch.cat([scale for _, scale, _ in blocks]).view(-1, TILE_ROWS),
        torch.cat([_widened(outliers, width) for _, _, outliers in blocks]).view(-1, TILE_ROWS, width),
        n,
        k,
    )


def _padded_tiles(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % TILE_ROWS
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _widened(outliers: Tensor, width: int) -> Tensor:
    missing = width - outliers.shape[-1]
    return torch.nn.functional.pad(outliers, (0, missing), value=NONE) if missing else outliers


def _of_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [tiles, steps, 1536], scale[rows] and outliers[rows, E] of rows that fill whole tiles."""
    bits = weight.view(torch.int16)
    exponents = ((bits >> 7) & 255).to(torch.uint8)
    if bool((exponents == 255).any()):
        raise KernelError("a weight that is NaN or infinite has no form of 12 bits")
    empty = (bits & 0x7FFF).amax(1, keepdim=True) == 0
    low = _windows(exponents, empty)
    outside = _outside(exponents, low) & ~empty
    codes = torch.where(outside | empty, low, exponents) - low
    kept = torch.where(outside, bits.new_zeros(()), bits)
    plain = ((kept >> 8) & 0x80 | kept & 0x7F).to(torch.uint8)
    top = low.to(torch.float64) + (WINDOW - 1 - BIAS)
    scale = torch.where(empty, 0.0, torch.exp2(top)).to(torch.float32)
    return _tiles(codes, plain), scale.squeeze(1), _outliers(outside, bits)


def _outside(exponents: Tensor, low: Tensor) -> Tensor:
    return (exponents < low) | (exponents > low + (WINDOW - 1))


def _windows(exponents: Tensor, empty: Tensor) -> Tensor:
    """The smallest exponent [rows, 1] of the window that leaves the fewest outside, of those tried."""
    top = exponents.amax(1, keepdim=True).to(torch.int16)
    best, fewest = _best(exponents, [top - down for down in range(TRIED)])
    most = allowed(exponents.shape[1])
    if bool((fewest.masked_fill(empty, 0) > most).any()):  # some may lie far above all others
        tops = exponents.to(torch.int16).topk(min(most + 1, exponents.shape[1]), dim=1).values.split(1, dim=1)
        other, left = _best(exponents, list(tops))
        best = torch.where(left < fewest, other, best)
    return best


def _best(exponents: Tensor, tops: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of windows by their largest exponents the one that leaves the fewest outside, and how many."""
    tried = [(top - (WINDOW - 1)).clamp(min=1).to(torch.uint8) for top in tops]
    best, fewest = tried[0], _outside(exponents, tried[0]).sum(1, keepdim=True)
    for low in tried[1:]:
        count = _outside(exponents, low).sum(1, keepdim=True)
        best, fewest = torch.where(count < fewest, low, best), torch.minimum(count, fewest)
    return best, fewest


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
    """Both [rows, K] uint8 -> [tiles, steps, 1536]."""
    missing = -codes.shape[1] % STEP
    steps = (codes.shape[1] + missing) // STEP

    def parts(values: Tensor, *last: int) -> Tensor:  # tile, step, half of the rows, r, t, ...
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return padded.view(-1, 2, 8, steps, 4, *last).movedim(3, 1)

    a, c, b, d = parts(plain, 4, 4).unbind(-1)  # of a word; its bytes are mantissas of a, b, c, d and others' signs
    words = torch.stack([a & 127 | b & 128, b & 127 | a & 128, c & 127 | d & 128, d & 127 | c & 128], -1)
    e = parts(codes, 2, 8).to(torch.int32).unbind(-1)
    exponents = e[6] >> 1 | (e[6] & 1) << 31 | e[7] << 15
    for one, shift in zip(e, SHIFTS, strict=False):
        exponents = exponents | one << shift
    beside = exponents.view(torch.uint8).permute(0, 1, 3, 4, 2, 5)  # tile, step, r, t, half, 8 bytes
    return torch.cat([words.flatten(2), beside.flatten(2)], -1)


def decode(tiles: CompactTiles) -> Tensor:
    """weight[N, K] bfloat16: the inverse of `encode`."""
    w, scale, outliers, n, k, _ = alone(tiles)
    steps = w.shape[1]
    first, second, third, fourth = w[..., :PLAIN_BYTES].reshape(-1, steps, 2, 8, 4, 4, 4).unbind(-1)
    order = [first & 127 | second & 128, third & 127 | fourth & 128, second & 127 | first & 128]
    plain = torch.stack([*order, fourth & 127 | third & 128], -1)
    beside = w[..., PLAIN_BYTES:].reshape(-1, steps, 8, 4, 2, 8).permute(0, 1, 4, 2, 3, 5)
    words = beside.contiguous().view(torch.int32)
    last = [(words & 7) << 1 | words >> 31 & 1, words >> 15 & 15]
    codes = torch.stack([*(words >> shift & 15 for shift in SHIFTS), *last], -1)

    def rows(values: Tensor) -> Tensor:
        return values.movedim(1, 3).reshape(-1, steps * STEP)[:n, :k]

    held = scale.to(torch.float32).flatten()[:n].unsqueeze(1)  # a reference has it in float64
    low = (held.view(torch.int32) >> 23) - (WINDOW - 1)  # the exponent of a power of two
    kept = rows(plain).to(torch.int32)
    sign, rest = (kept & 0x80) << 8, (rows(codes.flatten(4)) + low) << 7 | kept & 0x7F
    bits = torch.where(held == 0, sign, sign | rest).to(torch.int16)
    row, place = (outliers.flatten(0, 1)[:n] != NONE).nonzero(as_tuple=True)
    found = outliers.flatten(0, 1)[row, place]
    bits[row, found & 0xFFFF] = (found >> 16).to(torch.int16)
    return bits.view(torch.bfloat16)


def alike(parts: list[CompactTiles]) -> list[CompactTiles]:
    """The same tiles, all with the same room for outliers."""
    width = max(one.outliers.shape[2] for one in parts)
    return [one._replace(outliers=_widened(one.outliers, width)) for one in parts]


def pair(gate: CompactTiles, up: CompactTiles | None = None) -> CompactTiles:
    """The "both" of a gate and its up, of 16 N rows each; without `up`, of one weight of 32 N rows that holds both."""
    parts = alike([alone(one) for one in (gate, up) if one is not None])

    def interleaved(tables: list[Tensor]) -> Tensor:
        held = [_eights(one).flatten(0, 1) for one in tables]
        gate, up = held if len(held) == 2 else held[0].chunk(2)
        return _of_eights(torch.stack([gate, up], 1))

    w, scale = interleaved([one.w for one in parts]), interleaved([one.scale for one in parts])
    outliers = interleaved([one.outliers for one in parts])
    return CompactTiles(w, scale, outliers, sum(one.n for one in parts), gate.k, "both")


def alone(tiles: CompactTiles) -> CompactTiles:
    """The same rows in tiles of their own: a copy where they lie paired."""
    if tiles.part == "all":
        return tiles

    def own(table: Tensor) -> Tensor:
        gate, up = _eights(table).unbind(1)
        rows = {"gate": gate, "up": up}.get(tiles.part)
        return _of_eights((torch.cat([gate, up]) if rows is None else rows).unflatten(0, (-1, 2)))

    w, scale, outliers = (own(table) for table in tiles[:3])
    return CompactTiles(w, scale, outliers, tiles.n, tiles.k)


def _eights(table: Tensor) -> Tensor:
    """[tiles, 2, ...]: what belongs to 8 rows each, of bytes [tiles, steps, 1536], of scales or of outliers."""
    if table.dtype != torch.uint8:
        return table.unflatten(1, (2, -1))
    plain, beside = table.split([PLAIN_BYTES, STEP_BYTES - PLAIN_BYTES], -1)
    halves = beside.unflatten(2, (-1, 2, 8)).movedim(3, 1).flatten(3)  # tile, half, step, 32 lanes by 8 bytes
    return torch.cat([plain.unflatten(2, (2, -1)).movedim(2, 1), halves], -1)


def _of_eights(table: Tensor) -> Tensor:
    if table.dtype != torch.uint8:
        return table.flatten(1, 2).contiguous()
    plain, beside = table.split([PLAIN_BYTES // 2, (STEP_BYTES - PLAIN_BYTES) // 2], -1)
    codes = beside.unflatten(3, (-1, 8)).movedim(1, 3).flatten(2)
    return torch.cat([plain.movedim(1, 2).flatten(2), codes], -1)
