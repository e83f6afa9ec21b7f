"""The size of a model's KV cache, from its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelpatch.patching.match import text_config
from accelpatch.recipe.schema import KV_CACHES


def cache_size(model: nn.Module, wanted: int | None, form: str = "auto") -> tuple[int | None, int]:
    """(tokens, bytes) of a batch-1 KV cache: 2 x layers x KV heads x tokens x the bytes of a head's row, in the model's
    dtype or, of another format of KV_CACHES, with its scale.

    wanted: the length in tokens; None: the model's maximum, but at most 4096. (None, 0) for models without a KV cache.
    """
    text = text_config(model)
    layers, heads, hidden = (_count(text, f) for f in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden) or getattr(text, "is_encoder_decoder", False):
        return None, 0
    length = wanted or min(_count(text, "max_position_embeddings") or 2048, 4096)
    size, kv = _count(text, "head_dim") or hidden // heads, _count(text, "num_key_value_heads") or heads
    width = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    number, scale = KV_CACHES[form]
    return length, 2 * layers * kv * length * (size * (number or width) + scale)


def _count(config: Any, name: str) -> int:
    """A positive integer of the configuration; 0 where it is missing or of another kind (vision models have lists)."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0
