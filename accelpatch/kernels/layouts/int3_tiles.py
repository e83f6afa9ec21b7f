"""3-bit weights in tiles of the HIP kernels, from and to the canonical tensors, exactly.

A tile is 16 rows by 128 values of K, 768 bytes; its bits are described at `Int3` in hip/gemv/formats.h. Groups, scales
and offsets are those of 4-bit tiles (int4_tiles.py), and rows of gate and up can be interleaved (tiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.arguments import check_scale, require
from accelpatch.kernels.layouts import int4_tiles, tiling
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import Int3Rows, kind_of
from accelpatch.kernels.layouts.tiling import TILE_VALUES

TILE_BYTES, PLACES = 768, 32  # of a step, and quarters of two rows 8 apart, whose words lie side by side
PAIRS = 512  # bytes of the first two words; the third ones follow


@dataclass(frozen=True, eq=False)
class Int3Tiles(Tiles):
    """w[tiles, steps, 768], and all else as of `Tiles`; kind: "none", "minimum" or "zero_point"."""

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return Int3Tiles, self.k, self.group, self.kind, self.scale.dtype

    @classmethod
    def of(cls, rows: Int3Rows) -> Int3Tiles:  # type: ignore[override]
        """From a canonical weight. Raises KernelError for groups, scales or offsets that tiles cannot hold."""
        from accelpatch.kernels.ops.linear import int3_linear

        group = check_scale("tiles", rows.n, rows.k, rows.scale, rows.offset)
        reason = int4_tiles.unfit(rows.k, group, rows.scale.dtype)
        require(reason is None, "tiles", str(reason))
        fits = int4_tiles.exact(rows.offset, rows.scale.dtype)
        require(fits, "tiles", f"an offset is no number of {rows.scale.dtype}")
        offset = None if rows.offset is None else rows.offset.to(rows.scale.dtype)
        place = int4_tiles.places(rows.k, group)
        tables = [None if one is None else tiling.tile_scales(one, **place) for one in (rows.scale, offset)]
        w = tiling.tile_int3(int3_linear.unpack(rows.w).view(torch.uint8))
        assert tables[0] is not None
        return cls(w, tables[0], tables[1], rows.n, rows.k, group, kind_of(rows.offset), order=rows.order)

    def canonical(self) -> Int3Rows:  # type: ignore[override]
        """The weight that it was made of."""
        from accelpatch.kernels.ops.linear import int3_linear

        w, scale, offset, n, k, group, kind, _ = self.alone().arguments()
        scales = tiling.untile_scales(scale, n, k // group).contiguous()
        offsets = None if offset is None else tiling.untile_scales(offset, n, k // group).contiguous()
        if offsets is not None and kind == "zero_point":
            offsets = offsets.to(torch.int8)
        return Int3Rows(int3_linear.pack(tiling.untile_int3(w, n, k)), scales, offsets, order=self.order)

    def launch(self, gemm: bool = False) -> WeightArguments:
        """The arguments of a launch of gemv_int3."""
        made = super().launch()
        w = self.w.contiguous()
        form, variant = made.form or 0, variant_of(0 if self.group == self.k else self.group, self.kind)
        return WeightArguments(
            "gemv_int3", self.rows, self.k, w, form, made.scale, made.offset, self.kind, made.group_shift,
            made.prefetchable, variant,
        )  # fmt: skip

    @staticmethod
    def eights(table: Tensor) -> Tensor:
        """As of all tiles: [tiles, 2, steps, 384] of the weight."""
        if table.dim() != 3:
            return Tiles.eights(table)
        first, third = (table[..., cut].unflatten(2, (PLACES, 2, -1)) for cut in (slice(PAIRS), slice(PAIRS, None)))
        return torch.cat([first, third], -1).movedim(3, 1).flatten(3)

    @staticmethod
    def of_eights(table: Tensor) -> Tensor:
        """As of all tiles."""
        if table.dim() != 4:
            return Tiles.of_eights(table)
        words = table.unflatten(3, (PLACES, -1)).movedim(1, 3)
        return torch.cat([words[..., :8].flatten(2), words[..., 8:].flatten(2)], 2).contiguous()


def variant_of(group: int, kind: str) -> str:
    """The library of gemv_int3 for groups of a size (0: whole rows) and a kind of offset."""
    return f"g{min(group or TILE_VALUES, TILE_VALUES)}_{kind}"
