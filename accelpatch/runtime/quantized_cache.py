"""transformers' quantised cache, asked for by `generate(cache_implementation="quantized")`.

Where decode steps run over a static cache in that format, the tokens are kept there, and the call's own cache is a
DynamicCache.
"""

from __future__ import annotations

import copy
from typing import Any

from accelpatch.kernels.layouts.kv_states import FP8, INT8

FORMAT = "_accelpatch_format"  # attribute of a cache: the format of the static cache that keeps its tokens
TAKEN = "KV cache in {}, for cache_implementation='quantized'"  # in the report
QUANTIZED = "QuantizedCache"


def format_asked(config: Any) -> str | None:
    """The format of kernels/layouts/kv_states.py that a generation config asks for; None for any other cache. No
    kernel reads the groups of caches with fewer than 8 bits."""
    if getattr(config, "cache_implementation", None) != "quantized" or (getattr(config, "num_beams", 1) or 1) > 1:
        return None
    given: Any = getattr(config, "cache_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    backend = str(given.get("backend", "quanto")).lower()
    if backend == "fp8":
        return FP8
    return INT8 if backend == "hqq" and given.get("nbits") == 8 else None


def with_dynamic_cache(config: Any) -> Any:
    """A copy of a generation config that requests the default cache."""
    plain = copy.copy(config)
    plain.cache_implementation = plain.cache_config = None
    return plain


def format_of_cache(cache: Any, default: str) -> str:
    """The format of the static cache that keeps a cache's tokens: the one that a call requested, or the recipe's."""
    return str(getattr(cache, FORMAT, None) or default)
