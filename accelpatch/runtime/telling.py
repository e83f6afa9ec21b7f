"""Which kernels of a fused layer begin before the one before them has ended, as it tells them of its columns.

Attention needs q and k to weigh what is cached; v of the new token comes last. `down` begins with the first parts of
its input while the last tiles of gate and up are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.fused_product import Product
from accelpatch.kernels.hip import attention
from accelpatch.kernels.hip.binding import BLANK, PHASE, Told
from accelpatch.kernels.hip.layout import TILE_ROWS
from accelpatch.runtime.adapters import Adapted

BEFORE_HOPPER = frozenset({"sm_80", "sm_86", "sm_87", "sm_89"})
ALIGNED = 8  # columns of 16 bytes, which kernels read at once


class Slate:
    """Where layers' products make a lone row of what they tell of: int16[layers, columns of all of a layer's]."""

    def __init__(self, layers: int, columns: int, device: torch.device) -> None:
        self.words = torch.full((layers, -(-columns // ALIGNED) * ALIGNED), BLANK, dtype=torch.int16, device=device)

    def wipe(self, rows: int) -> None:
        """Before a step of so many rows; another kernel lies between it and the first that tells."""
        if rows == 1:
            self.words.fill_(BLANK)


def telling(layers: Sequence[Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], Slate]:
    """The fused layers of a model, whose products tell of what the kernels behind them can begin with."""
    heard = [
        (heard_by_attention(one.qkv, one.attention, dtype), heard_by_down(one.gate_up, one.down, one.activation))
        for one in layers
    ]
    made = [
        [one.qkv.n if first else 0, one.down.k if second else 0]
        for one, (first, second) in zip(layers, heard, strict=True)
    ]
    slate = Slate(len(layers), max(map(sum, made)), layers[0].down.raw.device)
    words = [row[: sum(widths)].split(widths) for row, widths in zip(slate.words, made, strict=True)]
    return tuple(map(_telling, layers, heard, words)), slate


def _telling(layer: Any, columns: tuple[int, int], words: Sequence[Tensor]) -> Any:
    """One layer; columns, words: of what attention and `down` hear of."""
    first, second = map(_told, columns, words)
    if first:
        layer = replace(layer, qkv=replace(layer.qkv, tells=first))
    if second:
        layer = replace(layer, gate_up=replace(layer.gate_up, tells=second), down=replace(layer.down, hears=second))
    return layer


def _told(columns: int, words: Tensor) -> Told | None:
    return Told(torch.zeros(2, dtype=torch.int32, device=words.device), columns, words) if columns else None


def heard_by_attention(qkv: Product | Adapted, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Columns of q and k, where the device library's attention is there to hear of them; else none."""
    columns = (shape.heads + shape.kv_heads) * shape.size
    if not isinstance(qkv, Product) or not qkv.one_launch() or columns % TILE_ROWS:
        return 0
    device = probe(qkv.raw.device)
    return columns if device.kind == "cpu" or (_overlap(device) and not attention.why_not(shape, dtype, device)) else 0


def heard_by_down(gate_up: Product | Adapted, down: Product | Adapted, activation: str) -> int:
    """All but the last of the parts in which an MLP's second product reads its input; none where it cannot hear."""
    if not isinstance(gate_up, Product) or not isinstance(down, Product) or not gate_up.one_launch(activation):
        return 0
    return (down.k - 1) // PHASE * PHASE if _overlap(probe(down.raw.device)) else 0


def _overlap(device: Device) -> bool:
    """Whether a kernel can begin before the one before it has ended; on a CPU, for tests, as if one could."""
    return device.kind == "cpu" or (device.vendor == "nvidia" and device.arch not in BEFORE_HOPPER)


def silent(product: Product | Adapted) -> Product | Adapted:
    """The same product, telling nobody, and waiting for nobody to tell."""
    return replace(product, tells=None, hears=None) if isinstance(product, Product) else product
