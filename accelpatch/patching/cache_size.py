"""How large a model's KV cache is, by its configuration."""

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
    width = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    number, scale = KV_CACHES[form]
    # Layers of one model may differ in their heads: transformers then gives each layer a configuration of its own.
    each = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * layers
    row_bytes = sum(
        (_count(one, "num_key_value_heads") or heads)
        * ((_count(one, "head_dim") or hidden // heads) * (number or width) + scale)
        for one in each[: layers - _count(text, "num_kv_shared_layers")]
    )
    return length, 2 * length * row_bytes


def _count(config: Any, name: str) -> int:
    """A positive integer of the configuration; 0 where it is missing or of another kind (vision models have lists)."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0
