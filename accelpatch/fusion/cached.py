"""What the layers of a model cache, by which a cache is known to be one of the model's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.layer_description import LayerDescription, size_of


@dataclass(frozen=True)
class Cached:
    """What a layer caches. window: its sliding window in tokens, the new one included, 0 for none. heads, sizes, dtype:
    of keys and values, whose sizes may differ; heads is 0 where that is not known, as of some layers' modules. device:
    where they lie, if known. Layers of any window are equal: static caches keep all tokens."""

    window: int = field(compare=False)
    heads: int = 0
    sizes: tuple[int, int] = (0, 0)
    dtype: torch.dtype | None = None
    device: torch.device | None = field(default=None, repr=False)


def cached_by(layer: Any, dtype: torch.dtype, known: tuple[int, int] | None = None) -> Cached:
    """What a decoder layer caches, in `dtype`. known: (heads of the cache, head size), where the layer is fused."""
    described = LayerDescription(layer)
    if described.attention is None:
        return Cached(0)
    window, found = described.attention.window, known or _heads_of_module(described)
    return Cached(window) if found is None else Cached(window, found[0], (found[1], found[1]), dtype)


def _heads_of_module(layer: LayerDescription) -> tuple[int, int] | None:
    attention = layer.attention
    linears = () if attention is None or attention.unknown() else layer.qkv
    if len(linears) != 3 or not all(hasattr(one, "out_features") for one in linears):
        return None
    try:
        assert attention is not None
        return attention.heads([size_of(one)[0] for one in linears])[1:]
    except CannotFuse:
        return None
