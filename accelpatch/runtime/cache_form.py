"""Whether a KV cache of transformers is one that steps over a static cache, and fused layers, can continue.

They take all layers to hold the same tokens: `length` of each, or those that its sliding window still shows. A program
may have it otherwise: tokens evicted from some layers, a layer left out, keys and values cut apart. What comes of that
is known to the modules alone, over the caller's own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache

from accelpatch.fusion.cached import Cached
from accelpatch.runtime.cache_contents import ATTACHED, DETACHED, attached, storing, window_of
from accelpatch.runtime.quantized_cache import QUANTIZED

# Methods that steps and fused layers over a cache stand for: one that is set on an instance is called by modules alone.
METHODS = frozenset({"update", "get_seq_length", "get_mask_sizes", "crop", "reorder_cache"})


def why_not(cache: Any) -> str | None:
    """Why only the modules can continue a cache, whatever the model; None where steps and fused layers can, too."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        packed = ", whose groups of 2 or 4 bits no kernel reads" if type(cache).__name__ == QUANTIZED else ""
        return f"the cache is a {type(cache).__name__}{packed}"
    if not METHODS.isdisjoint(vars(cache)):
        return "the cache has a method of its own on the instance"
    layers = storing(cache)
    for layer in layers:
        if (type(layer) not in ATTACHED and type(layer) not in DETACHED) or getattr(layer, "record_past", False):
            return f"a layer of the cache is a {type(layer).__name__}"
        if not METHODS.isdisjoint(vars(layer)):
            return "a layer of the cache has a method of its own on the instance"
    length = cache.get_seq_length()
    if attached(cache) is None and not all(_holds(layer, length, layers[0]) for layer in layers):
        return "the layers of the cache do not hold the same tokens"
    return None


def misfit(cache: Any, model: Sequence[Cached]) -> str | None:
    """Why a cache is not one of a model with these layers; None where it may be."""
    windows, contents = [window_of(layer) for layer in storing(cache)], attached(cache)
    filled = bool(cache.get_seq_length())
    if not (filled or any(windows)):  # layers come when they are filled
        return None
    if len(windows) != len(model):
        return f"the cache has {len(windows)} layers, and the model {len(model)}"
    if any(windows) and windows != [layer.window for layer in model]:
        return "the cache has other sliding windows than the model"
    if contents is not None and contents.fits is model:
        return None
    layers = storing(cache) if contents is None else contents.static.layers
    for layer, wanted in zip(layers if filled else (), model, strict=False):
        for one, size in zip((layer.keys, layer.values) if wanted.heads else (), wanted.sizes, strict=False):
            if (one.shape[1], one.shape[3], one.dtype) != (wanted.heads, size, wanted.dtype):
                return f"the cache holds {list(one.shape)} {one.dtype}, and the model {wanted}"
    if contents is not None:
        contents.fits = model
    return None


def _holds(layer: Any, length: int, first: Any) -> bool:
    """Whether a layer holds the last of `length` tokens, all that its window shows, for as many rows as the first."""
    keys, values = layer.keys, layer.values
    if layer.get_seq_length() != length:
        return False
    if not length:
        return all(one is None or not one.numel() for one in (keys, values))
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor)) or not keys.dim() == values.dim() == 4:
        return False
    kept = min(length, layer.sliding_window - 1) if layer.is_sliding else length
    return keys.shape[:3] == values.shape[:3] and (keys.shape[0], keys.shape[2]) == (first.keys.shape[0], kept)
