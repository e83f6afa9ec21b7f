"""Weight layouts of the HIP kernels: 4-bit values in tiles, and tables of their scales; each with its inverse.

A tile is 16 rows by 128 values of K, 1,024 bytes: 16 bytes for (row r, quarter t) at ``(4 r + t) * 16``; 32-bit word p
of those holds values ``32 p + 8 t + e``, value ``e = 2 i`` in nibble i and ``e = 2 i + 1`` in nibble ``i + 4``. A code
u of 0 to 15 is stored as u - 8 in two's complement, so that a mask gives four signed bytes, 16 (u - 8) each. Rows and K
are padded with the code 0. What rows a tile has, and gate and up in one: tiled.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, TILE_VALUES = 16, 128
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the order of eight values in the bytes of a lane's operands
_SIGNS = 0x88  # by exclusive or: two codes u of 0 to 15 to u - 8 in two's complement, and back


def whole_tiles(rows: Tensor) -> Tensor:
    """With rows of zeros up to a multiple of TILE_ROWS."""
    missing = -rows.shape[0] % TILE_ROWS
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def tile_int4(q: Tensor) -> Tensor:
    """int8 [N, K / 2] (low nibble = even k) -> int8 [tiles, steps, 1024]."""
    packed = q.view(torch.uint8)
    steps = -(-2 * packed.shape[1] // TILE_VALUES)
    packed = torch.nn.functional.pad(packed, (0, steps * TILE_VALUES // 2 - packed.shape[1]))
    # tile, r, step, p, t; then of the 4 bytes that hold 8 values two times two
    first, second = whole_tiles(packed).reshape(-1, TILE_ROWS, steps, 4, 4, 2, 2).unbind(-1)
    even, odd = first & 15 | second << 4, first >> 4 | second & 240
    codes = torch.stack([even, odd], -2).permute(0, 2, 1, 4, 3, 5, 6)  # tile, step, r, t, p, byte
    return (codes ^ _SIGNS).reshape(codes.shape[0], steps, 1024).view(torch.int8)


def untile_int4(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """int8 [N, K / 2] from tiles of N = ``rows``, K = ``columns``; the inverse of `tile_int4`."""
    steps = tiles.shape[1]
    even, odd = (tiles.view(torch.uint8) ^ _SIGNS).view(-1, steps, TILE_ROWS, 4, 4, 2, 2).unbind(-2)
    first, second = even & 15 | odd << 4, even >> 4 | odd & 240
    packed = torch.stack([first, second], -1).permute(0, 2, 1, 4, 3, 5, 6)
    flat = packed.reshape(-1, steps * TILE_VALUES // 2)[:rows]
    return flat[:, : columns // 2].contiguous().view(torch.int8)


def tile_int3(u: Tensor) -> Tensor:
    """Codes u[N, K] of 0 to 7, uint8 -> int8 [tiles, steps, 768]; the bits of a tile: Int3 in hip/gemv/formats.h."""
    steps = -(-u.shape[1] // TILE_VALUES)
    codes = whole_tiles(torch.nn.functional.pad(u, (0, steps * TILE_VALUES - u.shape[1]))) ^ 4
    values = codes.view(-1, 2, TILE_ROWS // 2, steps, 4, 4, 8)[..., _ORDER].unflatten(-1, (2, 4))
    # tile, step, r % 8, t, r / 8, p and which half of its values: operand, byte
    o = values.permute(0, 3, 2, 5, 1, 4, 6, 7).flatten(5, 6).unbind(5)
    words = (o[0] << 5 | o[1] << 2 | o[6] & 3, o[2] << 5 | o[3] << 2 | o[7] & 3)
    third = o[4] << 5 | o[5] << 2 | o[6] >> 2 | o[7] >> 2 << 1
    parts = torch.stack(words, 5).flatten(2), third.flatten(2)
    return torch.cat(parts, 2).contiguous().view(torch.int8)


def untile_int3(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Codes u[N, K] uint8 of N = ``rows``, K = ``columns``; the inverse of `tile_int3`."""
    packed, steps = tiles.view(torch.uint8), tiles.shape[1]
    a, b = packed[..., :512].unflatten(2, (8, 4, 2, 2, 4)).unbind(5)
    c = packed[..., 512:].unflatten(2, (8, 4, 2, 4))
    o = [a >> 5, a >> 2 & 7, b >> 5, b >> 2 & 7, c >> 5, c >> 2 & 7, a & 3 | (c & 1) << 2, b & 3 | (c & 2) << 1]
    values = torch.stack(o, 5).unflatten(5, (4, 2)).permute(0, 4, 2, 1, 5, 3, 6, 7).flatten(-2)
    codes = torch.empty_like(values)
    codes[..., _ORDER] = values
    return codes.reshape(-1, steps * TILE_VALUES)[:rows, :columns].contiguous() ^ 4


def tile_scales(table: Tensor, *, steps: int, groups: int, group_shift: int) -> Tensor:
    """Scales or offsets [N, G] in a 16-bit dtype -> [tiles, sets, 8, groups, 2].

    groups: number of groups per K step. group_shift: 2 ** group_shift K steps share one set.
    """
    sets = ((steps - 1) >> group_shift) + 1
    padded = torch.nn.functional.pad(table, (0, sets * groups - table.shape[1]))
    tiles = whole_tiles(padded).view(-1, 2, 8, sets, groups)  # tile, r / 8, r % 8, set, group
    return tiles.permute(0, 3, 2, 4, 1).contiguous()


def untile_scales(tiles: Tensor, rows: int, count: int) -> Tensor:
    """[N, G] with N = ``rows``, G = ``count``; the inverse of `tile_scales`."""
    return tiles.permute(0, 4, 2, 1, 3).reshape(-1, tiles.shape[1] * tiles.shape[3])[:rows, :count]
