"""4-bit weights in tiles of the HIP kernels, from and to the canonical tensors, exactly; the bits of a tile: tiling.py.

Groups along K of 32, 64, or 128 times a power of two, or whole rows; scales and offsets of 16 bits. Codes of a codebook
(codebooks.py) have groups of 32 or 64 and float32 scales, whose high and low halves lie in the tables of scales and of
offsets; those of e2m1 have groups of 32, whose scales bfloat16 represents. Those of nvfp4 have groups of 16, the scales
of two of which share 16 bits, and float64 factors of rows, [tiles, 16], as the offset.

The rows of gate and up can be interleaved (tiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.arguments import check_scale, require
from accelpatch.kernels.codebooks import CODEBOOKS, E4M3, E8M0, NVFP4
from accelpatch.kernels.codebooks import scale_dtype as dtype_of
from accelpatch.kernels.compiling.gpu_libraries import CODES
from accelpatch.kernels.layouts import tiling
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import Int4Rows, kind_of
from accelpatch.kernels.layouts.tiled import Tiled
from accelpatch.kernels.layouts.tiling import TILE_ROWS, TILE_VALUES

ONE_GROUP = 1 << 20  # the C interface's group size for one group per row
NO_SHIFT_LEFT = 30  # all steps share one set of scales


@dataclass(frozen=True, eq=False)
class Tiles(Tiled):
    """w[tiles, steps, 1024], scale and offset[tiles, sets, 8, groups, 2] of a weight[n, k]; group: values along K per
    scale.

    kind: "none", "minimum", "zero_point" (integers stored in scale's dtype) or a codebook's name. part: as in tiled.py.
    """

    w: Tensor
    scale: Tensor
    offset: Tensor | None
    n: int
    k: int
    group: int
    kind: str
    part: str = "all"
    order: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """What `tiled_int4_linear` takes between x and the bias."""
        return self.w, self.scale, self.offset, self.n, self.k, self.group, self.kind, self.part

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return Tiles, self.k, self.group, self.kind, self.scale.dtype

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        """None."""
        return None

    @classmethod
    def of(cls, rows: Int4Rows) -> Tiles:
        """As `pack`."""
        return cls.pack(*rows.arguments(), order=rows.order)

    def canonical(self) -> Int4Rows:
        """The weight that it was made of."""
        q, scale, offset = self.unpack()
        return Int4Rows(q, scale, offset, self.kind if self.kind in CODEBOOKS else "", order=self.order)

    @classmethod
    def pack(
        cls, q: Tensor, scale: Tensor, offset: Tensor | None = None, codes: str = "", order: Tensor | None = None
    ) -> Tiles:
        """From canonical tensors. Raises KernelError for groups, scales or offsets that tiles cannot hold."""
        n, k = q.shape[0], 2 * q.shape[1]
        group = check_scale("tiles", n, k, scale, offset)
        reason = unfit(k, group, scale.dtype, codes)
        require(reason is None, "tiles", str(reason))
        if codes == NVFP4 and offset is not None:
            table, factors = _table(scale.view(torch.int16), k, group), tiling.whole_tiles(offset)
            return cls(tiling.tile_int4(q), table, factors.view(-1, TILE_ROWS), n, k, group, codes, order=order)
        require(exact(offset, scale.dtype), "tiles", f"an offset is no number of {scale.dtype}")
        cast_offset = None if offset is None else offset.to(scale.dtype)
        first, second = tables_of(scale) if codes else (scale, cast_offset)
        tables = _table(first, k, group), None if second is None else _table(second, k, group)
        return cls(tiling.tile_int4(q), *tables, n, k, group, codes or kind_of(offset), order=order)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, scale and offset (zero points as int8); the inverse of `pack`."""
        w, scale, offset, n, k, group, kind, _ = self.alone().arguments()
        if kind == NVFP4:
            scales = tiling.untile_scales(scale, n, k // _place(group)).contiguous().view(E4M3)
            return tiling.untile_int4(w, n, k), scales, offset.reshape(-1, 1)[:n].contiguous()
        scales = tiling.untile_scales(scale, n, k // group)
        offsets = None if offset is None else tiling.untile_scales(offset, n, k // group)
        if kind in CODEBOOKS:
            return tiling.untile_int4(w, n, k), of_tables(scales, offsets), None
        if offsets is not None and kind == "zero_point":
            offsets = offsets.to(torch.int8)
        return tiling.untile_int4(w, n, k), scales, offsets

    def launch(self, gemm: bool = False) -> WeightArguments:
        """The arguments of a launch of the group size's gemv, or of int4_gemm."""
        form, shift = (
            ONE_GROUP if self.group == self.k else _place(self.group),
            places(self.k, self.group)["group_shift"],
        )
        w_and_scale = (self.w.contiguous(), form, self.scale.contiguous())
        offset = None if self.offset is None else self.offset.contiguous()
        prefetchable = w_and_scale[0] is self.w and w_and_scale[2] is self.scale and offset is self.offset
        function, variant = ("int4_gemm", "") if gemm else (gemv_of(form), self.kind)
        return WeightArguments(
            function, self.rows, self.k, *w_and_scale, offset, self.kind, shift, prefetchable, variant
        )

    @staticmethod
    def eights(table: Tensor) -> Tensor:
        """As of all tiles."""
        if table.dim() == 2:  # factors of rows
            return table.unflatten(1, (2, -1))
        return table.unflatten(2, (2, -1)).movedim(2, 1) if table.dim() == 3 else table.movedim(4, 1)

    @staticmethod
    def of_eights(table: Tensor) -> Tensor:
        """As of all tiles."""
        if table.dim() == 3:
            return table.flatten(1).contiguous()
        return (table.movedim(1, 2).flatten(2) if table.dim() == 4 else table.movedim(1, 4)).contiguous()


def places(k: int, group: int) -> dict[str, int]:
    """Arguments for tiling.tile_scales: steps of K, groups per step, log2 of the steps that share a set of scales."""
    steps, whole, group = -(-k // TILE_VALUES), group == k, _place(group)
    shift = NO_SHIFT_LEFT if whole else max(group // TILE_VALUES, 1).bit_length() - 1
    return {"steps": steps, "groups": 1 if whole else max(TILE_VALUES // group, 1), "group_shift": shift}


def _place(group: int) -> int:
    """Values along K whose scales share a place of a table: of nvfp4, the only one with groups of 16, two groups'."""
    return max(group, 32)


def exact(offset: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `dtype` represents the offsets exactly; values are compared only where the dtype differs. The factors of
    rows, of nvfp4, are stored unchanged."""
    return (
        offset is None
        or dtype == E4M3
        or offset.dtype == dtype
        or torch.equal(offset.to(dtype).to(offset.dtype), offset)
    )


def halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 16 bits of float32 numbers, as int16."""
    pairs = scale.contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    return pairs[..., 1], pairs[..., 0]


def of_halves(high: Tensor, low: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return torch.stack((low, high), -1).view(torch.float32).squeeze(-1)


def tables_of(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the tables of a codebook's scales are made of, 16 bits each: halves of float32, or bfloat16 of E8M0."""
    return (scale.to(torch.bfloat16), None) if scale.dtype == E8M0 else halves(scale)


def of_tables(first: Tensor, second: Tensor | None) -> Tensor:
    """The inverse of `tables_of`."""
    return first.float().to(E8M0) if second is None else of_halves(first, second)


def _table(table: Tensor, k: int, group: int) -> Tensor:
    steps, groups, shift = places(k, group).values()
    return tiling.tile_scales(table, steps=steps, groups=groups, group_shift=shift)


def gemv_of(group: int) -> str:
    """The function of the device library for groups of a size, up to 8 rows of x."""
    return {16: "gemv_int4_32", 32: "gemv_int4_32", 64: "gemv_int4_64"}.get(group, "gemv_int4")


def unfit(k: int, group: int, scale_dtype: torch.dtype | None, codes: str = "") -> str | None:
    """Why a weight has no tiles; None where it has. codes: the name of a codebook, or an offset's kind."""
    if codes in CODEBOOKS:
        if codes not in CODES:
            return f"no GPU kernel has the table {codes}"
        sizes, wanted = {"e2m1": (32,), NVFP4: (16,)}.get(codes, (32, 64)), dtype_of(codes)
        if codes == NVFP4 and k % _place(group):
            return f"K = {k} is no multiple of the {_place(group)} values whose scales lie together"
        if group not in sizes or k % group or k <= group:
            return f"its groups are {' or '.join(map(str, sizes))} of a longer row, not {group} of {k}"
        return None if scale_dtype in (wanted, None) else f"its scales are {wanted}, not {scale_dtype}"
    runs = group in (32, 64) or (group % TILE_VALUES == 0 and (group & (group - 1)) == 0)
    if not runs and group != k:
        return f"its groups are 32, 64, 128 times a power of two, or whole rows, not {group}"
    if scale_dtype not in (torch.float16, torch.bfloat16):
        return f"its scales are float16 or bfloat16, not {scale_dtype}"
    return None
