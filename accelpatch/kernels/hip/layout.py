"""Weights as the HIP kernels read them: int4 in tiles, grouped scales beside them; each with its inverse.

A tile is 16 rows by 128 values of K, 1,024 bytes: 16 bytes for (row r, quarter t) at ``(4 r + t) * 16``; 32-bit word
p of those holds values ``32 p + 8 t + e``, value ``e = 2 i`` in nibble i and ``e = 2 i + 1`` in nibble ``i + 4``. A
code u of 0 to 15 lies there as u - 8 in two's complement, so that a mask gives four signed bytes, 16 (u - 8) each.
Rows and K are padded with the code 0. ``paired`` puts 8 gate rows and
their 8 up rows (the second half of N) into one tile, as the SiLU-gate epilogue wants them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, TILE_VALUES = 16, 128
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 neighbours each nibble of a word holds
_SIGNS = 0x88  # turns two codes of 0 to 15 into two's complement of what they are less 8, and back


def _row_order(rows: int, paired: bool) -> Tensor:
    """Row of the weight that each row of the tiles holds, -1 for padding: int64 [tiles * 16]."""
    if not paired:
        order = torch.full((-(-rows // TILE_ROWS) * TILE_ROWS,), -1)
        order[:rows] = torch.arange(rows)
        return order
    half = rows // 2
    gate = torch.full((-(-half // 8) * 8,), -1)
    gate[:half] = torch.arange(half)
    up = torch.where(gate < 0, gate, gate + half)
    return torch.stack([gate.view(-1, 8), up.view(-1, 8)], 1).flatten()


def _gather_rows(rows: Tensor, paired: bool) -> Tensor:
    order = _row_order(rows.shape[0], paired).to(rows.device)
    return torch.where((order >= 0).view(-1, *[1] * (rows.dim() - 1)), rows[order.clamp(min=0)], rows.new_zeros(()))


def _scatter_rows(tiled: Tensor, rows: int, paired: bool) -> Tensor:
    order = _row_order(rows, paired).to(tiled.device)
    out = tiled.new_empty((rows, *tiled.shape[1:]))
    out[order[order >= 0]] = tiled[order >= 0]
    return out


def tile_int4(q: Tensor, *, paired: bool = False) -> Tensor:
    """int8 [N, K / 2] (low nibble = even k) to int8 [tiles, steps, 1024]."""
    packed = q.view(torch.uint8)
    values = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    steps = -(-values.shape[1] // TILE_VALUES)
    values = torch.nn.functional.pad(values, (0, steps * TILE_VALUES - values.shape[1]))
    tiles = _gather_rows(values, paired).view(-1, TILE_ROWS, steps, 4, 4, 8)  # tile, r, step, p, t, e
    nibbles = tiles[..., list(_NIBBLES)].permute(0, 2, 1, 4, 3, 5)  # tile, step, r, t, p, nibble
    codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return (codes ^ _SIGNS).reshape(tiles.shape[0], steps, 1024).view(torch.int8)


def untile_int4(tiles: Tensor, rows: int, columns: int, *, paired: bool = False) -> Tensor:
    """Inverse of `tile_int4`: int8 [N, K / 2] from tiles of N = ``rows``, K = ``columns``."""
    steps = tiles.shape[1]
    words = (tiles.view(torch.uint8) ^ _SIGNS).view(-1, steps, TILE_ROWS, 4, 4, 4)
    nibbles = torch.stack([words & 15, words >> 4], -1).flatten(-2)
    values = torch.empty_like(nibbles)
    values[..., list(_NIBBLES)] = nibbles
    flat = values.permute(0, 2, 1, 4, 3, 5).reshape(-1, steps * TILE_VALUES)
    flat = _scatter_rows(flat, rows, paired)[:, :columns]
    return (flat[:, 0::2] | flat[:, 1::2] << 4).view(torch.int8)


def tile_scales(table: Tensor, *, steps: int, groups: int, group_shift: int, paired: bool = False) -> Tensor:
    """Scales or offsets [N, G] in a 16-bit dtype to [tiles, sets, 8, groups, 2].

    ``groups`` lie in one step of K; above one step, 2 ** ``group_shift`` steps share one set.
    """
    sets = ((steps - 1) >> group_shift) + 1
    padded = torch.nn.functional.pad(table, (0, sets * groups - table.shape[1]))
    tiles = _gather_rows(padded, paired).view(-1, 2, 8, sets, groups)  # tile, r / 8, r % 8, set, group
    return tiles.permute(0, 3, 2, 4, 1).contiguous()


def untile_scales(tiles: Tensor, rows: int, count: int, *, paired: bool = False) -> Tensor:
    """Inverse of `tile_scales`: [N, G] with N = ``rows``, G = ``count``."""
    flat = tiles.permute(0, 4, 2, 1, 3).reshape(-1, tiles.shape[1] * tiles.shape[3])
    return _scatter_rows(flat, rows, paired)[:, :count]
