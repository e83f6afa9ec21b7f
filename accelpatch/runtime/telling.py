"""Which kernels of a fused layer begin before the one before them has ended, as it tells them of its columns.

Attention needs q and k to weigh what is cached; v of the new token comes last. `down` begins with the first parts of
its input while the last tiles of gate and up are under way.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from accelpatch.device import probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.fused_product import Product
from accelpatch.kernels.hip import attention
from accelpatch.kernels.hip.binding import PHASE, Told
from accelpatch.kernels.hip.layout import TILE_ROWS
from accelpatch.runtime.adapters import Adapted


def telling_attention(qkv: Product | Adapted, shape: AttentionShape, dtype: torch.dtype) -> Product | Adapted:
    """The product of q, k and v, which tells of q and k where the device library's attention is there to hear."""
    columns = (shape.heads + shape.kv_heads) * shape.size
    if not isinstance(qkv, Product) or not qkv.one_launch() or columns % TILE_ROWS:
        return qkv
    device = probe(qkv.raw.device)
    if device.kind != "cpu" and attention.why_not(shape, dtype, device) is not None:
        return qkv
    return replace(qkv, tells=_told(qkv, columns))


def silent(product: Product | Adapted) -> Product | Adapted:
    """The same product, telling nobody."""
    return replace(product, tells=None) if isinstance(product, Product) else product


def telling_down(
    gate_up: Product | Adapted, down: Product | Adapted, activation: str
) -> tuple[Product | Adapted, Product | Adapted]:
    """Both products of an MLP: the first tells of all but the last of the parts in which the second reads its input."""
    if not isinstance(gate_up, Product) or not isinstance(down, Product) or not gate_up.one_launch(activation):
        return gate_up, down
    columns = (down.k - 1) // PHASE * PHASE
    told = _told(gate_up, columns) if columns else None
    return replace(gate_up, tells=told), replace(down, hears=told)


def _told(product: Product, columns: int) -> Told:
    return Told(torch.zeros(2, dtype=torch.int32, device=product.raw.device), columns)
