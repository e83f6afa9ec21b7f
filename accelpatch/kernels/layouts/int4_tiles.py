"""4-bit weights in tiles of the HIP kernels, from and to the canonical tensors, exactly; the bits of a tile: tiling.py.

Groups along K of 32, 64, or 128 times a power of two, or whole rows; scales and offsets of 16 bits. Codes of a codebook
(codebooks.py) have groups of 32 or 64 and float32 scales, whose halves lie where scales and offsets do.

The rows of gate and up can be interleaved: 8 of each in a tile, as the kernels' gate epilogue needs them. The two
weights then share the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelpatch.kernels.arguments import check_scale, require
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.layouts import tiling
from accelpatch.kernels.layouts.layout import (
    WeightArguments,
    concatenated_tiles,
    nbytes_of,
    split_tiles,
    why_not_concat_tiles,
    why_not_split,
)
from accelpatch.kernels.layouts.tiling import TILE_ROWS, TILE_VALUES

ONE_GROUP = 1 << 20  # the C interface's group size for one group per row
NO_SHIFT_LEFT = 30  # all steps share one set of scales


class Tiles(NamedTuple):
    """w[tiles, steps, 1024], scale and offset[tiles, sets, 8, groups, 2] of a weight[n, k]; group: values along K per
    scale.

    kind: "none", "minimum", "zero_point" (integers stored in scale's dtype) or a codebook's name. part: "all": the rows
    in their order. "both": the first and second half of the rows interleaved. "gate" or "up": this weight is the first
    or second half of interleaved tiles of 2 n rows.
    """

    w: Tensor
    scale: Tensor
    offset: Tensor | None
    n: int
    k: int
    group: int
    kind: str
    part: str = "all"

    @property
    def rows(self) -> int:
        """Rows in the tiles."""
        return self.n if self.part in ("all", "both") else 2 * self.n

    @property
    def tiled(self) -> bool:
        """Whether rows lie in tiles."""
        return True

    @property
    def whole_rows(self) -> bool:
        """A launch may begin with the first columns of x."""
        return False

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return Tiles, self.k, self.group, self.kind, self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return nbytes_of(self)

    @classmethod
    def of_codes(cls, q: Tensor, scale: Tensor, codebook: str) -> Tiles:
        """From q[N, K / 2] of codes of a codebook and float32 scale[N, G]. Raises KernelError for other groups."""
        n, k = q.shape[0], 2 * q.shape[1]
        group = check_scale("tiles", n, k, scale)
        reason = unfit_codes(k, group)
        require(reason is None, "tiles", str(reason))
        require(scale.dtype == torch.float32, "tiles", f"scales of a codebook are float32, not {scale.dtype}")
        high, low = (_table(half, k, group) for half in halves(scale))
        return cls(tiling.tile_int4(q), high, low, n, k, group, codebook)

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tiles:
        """From canonical tensors. Raises KernelError for groups, scales or offsets that tiles cannot hold."""
        n, k = q.shape[0], 2 * q.shape[1]
        group = check_scale("tiles", n, k, scale, offset)
        reason = unfit(k, group, scale.dtype)
        require(reason is None, "tiles", str(reason))
        require(exact(offset, scale.dtype), "tiles", f"an offset is no number of {scale.dtype}")
        beside = None if offset is None else offset.to(scale.dtype)
        scales, offsets = _table(scale, k, group), None if beside is None else _table(beside, k, group)
        return cls(tiling.tile_int4(q), scales, offsets, n, k, group, kind_of(offset))

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, scale and offset (zero points as int32); the inverse of `pack` and `of_codes`."""
        w, scale, offset, n, k, group, kind, _ = self.alone()
        scales = tiling.untile_scales(scale, n, k // group)
        beside = None if offset is None else tiling.untile_scales(offset, n, k // group)
        if kind in CODEBOOKS:
            assert beside is not None
            return tiling.untile_int4(w, n, k), of_halves(scales, beside), None
        if beside is not None and kind == "zero_point":
            beside = beside.to(torch.int32)
        return tiling.untile_int4(w, n, k), scales, beside

    def arguments(self) -> tuple[Any, ...]:
        """What `tiled_int4_linear` takes between x and the bias."""
        return tuple(self)

    def launch(self, gemm: bool = False) -> WeightArguments:
        """The arguments of a launch of the group size's gemv, or of int4_gemm."""
        form, shift = ONE_GROUP if self.group == self.k else self.group, places(self.k, self.group)["group_shift"]
        held = (self.w.contiguous(), form, self.scale.contiguous())
        beside = None if self.offset is None else self.offset.contiguous()
        prefetchable = held[0] is self.w and held[2] is self.scale and beside is self.offset
        function, variant = ("int4_gemm", "") if gemm else (gemv_of(form), self.kind)
        return WeightArguments(function, self.rows, self.k, *held, beside, self.kind, shift, prefetchable, variant)

    def alone(self) -> Tiles:
        """The same rows in tiles of their own; a copy where they were interleaved with others."""

        def own(table: Tensor) -> Tensor:
            gate, up = _eights(table).unbind(1)
            rows = {"gate": gate, "up": up}.get(self.part)
            return _of_eights((torch.cat([gate, up]) if rows is None else rows).unflatten(0, (-1, 2)))

        if self.part == "all":
            return self
        offset = None if self.offset is None else own(self.offset)
        return self._replace(w=own(self.w), scale=own(self.scale), offset=offset, part="all")

    def pair(self, up: Tiles | None = None) -> Tiles:
        """Interleave this gate and `up`, of 16 N rows each, to "both"; without `up`, it holds both in 32 N rows."""
        parts = [one.alone() for one in (self, up) if one is not None]
        w, scale = _interleaved([one.w for one in parts]), _interleaved([one.scale for one in parts])
        offsets = [one.offset for one in parts if one.offset is not None]
        offset = _interleaved(offsets) if offsets else None
        return parts[0]._replace(w=w, scale=scale, offset=offset, n=sum(one.n for one in parts), part="both")

    @staticmethod
    def alike(parts: list[Tiles]) -> list[Tiles]:
        """The same tiles, with tensors that can be concatenated: those of one format can."""
        return parts

    @staticmethod
    def why_not_concat(parts: Sequence[Any]) -> str | None:
        """As of all tiles."""
        return why_not_concat_tiles(parts)

    @classmethod
    def concat(cls, parts: Sequence[Tiles]) -> Tiles:
        """Row after row; the parts, of 16 N rows each and in tiles of their own, become views."""
        return parts[0]._replace(**concatenated_tiles(parts))

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """Parts are whole tiles."""
        return why_not_split(self, rows, TILE_ROWS)

    def split(self, rows: Sequence[int]) -> list[Tiles]:
        """Parts of so many rows each; views. Raises KernelError where tiles would be cut or are interleaved."""
        return split_tiles(self, rows)


def places(k: int, group: int) -> dict[str, int]:
    """Arguments for tiling.tile_scales: steps of K, groups per step, log2 of the steps that share a set of scales."""
    steps, whole = -(-k // TILE_VALUES), group == k
    shift = NO_SHIFT_LEFT if whole else max(group // TILE_VALUES, 1).bit_length() - 1
    return {"steps": steps, "groups": 1 if whole else max(TILE_VALUES // group, 1), "group_shift": shift}


def exact(offset: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `dtype` represents the offsets exactly; values are compared only where the dtype differs."""
    return offset is None or offset.dtype == dtype or torch.equal(offset.to(dtype).to(offset.dtype), offset)


def halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 16 bits of float32 numbers, as int16."""
    pairs = scale.contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    return pairs[..., 1], pairs[..., 0]


def of_halves(high: Tensor, low: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return torch.stack((low, high), -1).view(torch.float32).squeeze(-1)


def _table(table: Tensor, k: int, group: int) -> Tensor:
    steps, groups, shift = places(k, group).values()
    return tiling.tile_scales(table, steps=steps, groups=groups, group_shift=shift)


def kind_of(offset: Tensor | None) -> str:
    """The kind of a canonical offset, by its dtype: "none", "minimum" or "zero_point"."""
    return "none" if offset is None else "minimum" if offset.is_floating_point() else "zero_point"


def _interleaved(parts: list[Tensor]) -> Tensor:
    held = [_eights(one).flatten(0, 1) for one in parts]
    gate, up = held if len(held) == 2 else held[0].chunk(2)
    return _of_eights(torch.stack([gate, up], 1))


def _eights(table: Tensor) -> Tensor:
    """A table split into groups of 8 rows: [tiles, 2, ...]; for weights and scales."""
    return table.unflatten(2, (2, -1)).movedim(2, 1) if table.dim() == 3 else table.movedim(4, 1)


def _of_eights(table: Tensor) -> Tensor:
    return (table.movedim(1, 2).flatten(2) if table.dim() == 4 else table.movedim(1, 4)).contiguous()


def in_order(y: Tensor, part: str) -> Tensor:
    """Reorder output columns from the order of rows in the tiles to that of the weight, which is this `part`."""
    if part == "all":
        return y
    gate, up = y.unflatten(-1, (-1, 2, TILE_ROWS // 2)).unbind(-2)
    rows = {"gate": gate, "up": up}.get(part)
    return (torch.cat([gate, up], -2) if rows is None else rows).flatten(-2)


def in_tiles(bias: Tensor | None, part: str) -> Tensor | None:
    """A bias in the order of rows in the tiles; zero for rows of the other weight."""
    if bias is None or part == "all":
        return bias
    eights = bias.view(-1, TILE_ROWS // 2)
    nothing = torch.zeros_like(eights)
    both = {"both": eights.chunk(2), "gate": (eights, nothing), "up": (nothing, eights)}[part]
    return torch.stack(both, 1).flatten()


def gemv_of(group: int) -> str:
    """The function of the device library for groups of a size, up to 8 rows of x."""
    return {32: "gemv_int4_32", 64: "gemv_int4_64"}.get(group, "gemv_int4")


def unfit_codes(k: int, group: int) -> str | None:
    """Why a weight with a codebook has no tiles; None where it has."""
    fits = group in (32, 64) and k % group == 0 and k > group
    return None if fits else f"its groups are 32 or 64 of a longer row, not {group} of {k}"


def unfit(k: int, group: int, scale_dtype: torch.dtype | None) -> str | None:
    """Why a weight has no tiles; None where it has."""
    runs = group in (32, 64) or (group % TILE_VALUES == 0 and (group & (group - 1)) == 0)
    if not runs and group != k:
        return f"its groups are 32, 64, 128 times a power of two, or whole rows, not {group}"
    if scale_dtype not in (torch.float16, torch.bfloat16):
        return f"its scales are float16 or bfloat16, not {scale_dtype}"
    return None
