"""How large a model's KV cache is, by its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelpatch.patching.match import text_config
from accelpatch.recipe.schema import KV_CACHES


def cache_size(model: nn.Module, wanted: int | None, form: str = "auto") -> tuple[int | None, int]:
    """(tokens, bytes) of a batch-1 KV cache; (None, 0) for models without one.

    The bytes are 2 x layers x KV heads x tokens x bytes of one head's row, which includes the scale of a quantised
    format. wanted: the length in tokens; None: the model's maximum, but at most 4096. form: a format of KV_CACHES;
    "auto": the model's dtype.
    """
    text = text_config(model)
    layers, heads, hidden = (_count(text, f) for f in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden) or getattr(text, "is_encoder_decoder", False):
        return None, 0
    length = wanted or min(_count(text, "max_position_embeddings") or 2048, 4096)
    width = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    element_bytes, scale_bytes = KV_CACHES[form]
    # Layers of one model may differ in their heads: transformers then gives each layer a configuration of its own.
    each = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * layers
    row_bytes = sum(
        (_count(one, "num_key_value_heads") or heads)
        * ((_count(one, "head_dim") or hidden // heads) * (element_bytes or width) + scale_bytes)
        for one in each[: layers - _count(text, "num_kv_shared_layers")]
    )
    return length, 2 * length * row_bytes


def _count(config: Any, name: str) -> int:
    """A positive integer of the configuration; 0 if it is missing or not an integer (vision models have lists)."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0
