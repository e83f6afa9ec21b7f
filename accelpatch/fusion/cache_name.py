"""What transformers calls the KV cache in arguments and outputs: `cache` since 5.24, `past_key_values` before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.models.family import family_of_layer

FORMER = "past_key_values"
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else FORMER


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the KV cache named CACHE; as they are where both names, or neither, are given."""
    if CACHE in given:
        return dict(given)
    return {CACHE if name == FORMER else name: value for name, value in given.items()}


def layer_argument(layer: Any) -> str:
    """The name of a decoder layer's argument for the KV cache."""
    family = family_of_layer(layer)
    return CACHE if family is None or family.layer is None else family.layer.cache or CACHE
