"""Arguments of the linear layers whose 3-bit and 4-bit weights lie in tiles of the HIP kernels."""

from __future__ import annotations

from torch import Tensor

from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.layouts import int4_tiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.ops.linear import common


def check(op: str, x: Tensor, tiles: Tiles, tile_bytes: int, offset: Tensor | None, bias: Tensor | None) -> None:
    """Raise KernelError where x[..., K], tiles of a size, and bias[N] do not fit together. offset: of groups."""
    k, place = tiles.k, int4_tiles.places(tiles.k, tiles.group)
    require(x.dim() >= 1 and x.dtype in FLOATS, op, f"x is float [..., K], not {say(x)}")
    require(x.shape[-1] == k, op, f"x has {x.shape[-1]} features, the weight {k}")
    size = [-(-tiles.rows // TILE_ROWS), place["steps"], tile_bytes]
    require(list(tiles.w.shape) == size, op, f"the tiles of [{tiles.rows}, {k}] are {size}, not {say(tiles.w)}")
    interleaved = tiles.part == "all" or tiles.rows % (2 * TILE_ROWS) == 0
    require(interleaved, op, f"interleaved tiles hold a multiple of {2 * TILE_ROWS} rows, not {tiles.rows}")
    sets = ((place["steps"] - 1) >> place["group_shift"]) + 1
    size = [size[0], sets, TILE_ROWS // 2, place["groups"], 2]
    for table in (tiles.scale, tiles.scale if offset is None else offset):
        require(list(table.shape) == size, op, f"scale and offset are {size}, not {say(table)}")
    common.check_bias(op, x, tiles.n, bias, w=tiles.w, scale=tiles.scale, offset=tiles.offset)
