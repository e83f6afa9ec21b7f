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

from accelpatch.device import probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.fused_product import Product
from accelpatch.kernels.hip import attention
from accelpatch.kernels.hip.binding import BLANK, PHASE, Told
from accelpatch.kernels.hip.layout import TILE_ROWS
from accelpatch.runtime.adapters import Adapted

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
        (one.qkv.n if first else 0, one.down.k if second else 0)
        for one, (first, second) in zip(layers, heard, strict=True)
    ]
    device = layers[0].down.raw.device
    slate = Slate(len(layers), max(map(sum, made)), device)

    def told(columns: int, words: Tensor) -> Told:
        return Told(torch.zeros(2, dtype=torch.int32, device=device), columns, words)

    every = list(layers)
    for place, (one, columns, widths, words) in enumerate(zip(layers, heard, made, slate.words, strict=True)):
        of_qkv, of_both, _ = words.split((*widths, len(words) - sum(widths)))
        if columns[0]:
            every[place] = replace(every[place], qkv=replace(one.qkv, tells=told(columns[0], of_qkv)))
        if columns[1]:
            of_gate = told(columns[1], of_both)
            both = {"gate_up": replace(one.gate_up, tells=of_gate), "down": replace(one.down, hears=of_gate)}
            every[place] = replace(every[place], **both)
    return tuple(every), slate


def heard_by_attention(qkv: Product | Adapted, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Columns of q and k, where the device library's attention is there to hear of them; else none."""
    columns = (shape.heads + shape.kv_heads) * shape.size
    if not isinstance(qkv, Product) or not qkv.one_launch() or columns % TILE_ROWS:
        return 0
    device = probe(qkv.raw.device)
    return columns if device.kind == "cpu" or attention.why_not(shape, dtype, device) is None else 0


def heard_by_down(gate_up: Product | Adapted, down: Product | Adapted, activation: str) -> int:
    """All but the last of the parts in which an MLP's second product reads its input; none where it cannot hear."""
    if not isinstance(gate_up, Product) or not isinstance(down, Product) or not gate_up.one_launch(activation):
        return 0
    return (down.k - 1) // PHASE * PHASE


def silent(product: Product | Adapted) -> Product | Adapted:
    """The same product, telling nobody."""
    return replace(product, tells=None) if isinstance(product, Product) else product
