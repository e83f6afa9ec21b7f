"""The pages of transformers' continuous batching as this package's attention reads them, in all versions.

transformers gives each call of the model the PagedAttentionCache, and tensors of where tokens lie: for each group of
layers (all with full attention, all with one window) an index of the tokens that are read, those of one request after
those of another with a place for each new one at the end, and one of where the new ones are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from accelpatch.kernels.paged_rows import PagedRows
from accelpatch.modules.paged_cache import PagedCache

PAGED_CACHE = "cache"  # the argument that holds it, in all versions
READ, WRITE, QUERIES, KEYS = "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k"


def is_paged(given: Mapping[str, Any]) -> bool:
    """Whether a call, its arguments by name, is one of continuous batching over transformers' own cache."""
    cache = given.get(PAGED_CACHE)
    return isinstance(cache, PagedAttentionCache) and not isinstance(cache, PagedCache)


def longest(given: Mapping[str, Any]) -> int:
    """The most new tokens of a text in a call over pages, or more."""
    return int(given.get("max_length_q") or given.get("max_seqlen_q") or given["input_ids"].shape[-1])


def why_not(given: Mapping[str, Any]) -> str | None:
    """Why a call over pages needs transformers' own attention; None where this package's can run it."""
    if given.get("block_table") is not None:
        return "a block table, which flash-attn's kernels read"
    if not isinstance(given.get(READ), list) or not isinstance(given.get(WRITE), list):
        return "no indices of the tokens in the pages"
    return None


def paged_cache(given: Mapping[str, Any]) -> PagedCache:
    """The PagedCache of a call for which `why_not` has no reason."""
    cache: Any = given[PAGED_CACHE]
    queries, read, write = given[QUERIES], given[READ], given[WRITE]
    most = longest(given)
    kinds = _kinds(cache)
    keys = given[KEYS]
    groups = [
        PagedRows(queries, keys[kind] if isinstance(keys, Mapping) else keys, index, places, most)
        for kind, index, places in zip(kinds, read, write, strict=True)
    ]
    return PagedCache(_pages_of(cache), groups)


def _kinds(cache: Any) -> list[str]:
    """The kind of each group of layers, by the names of KEYS."""
    if hasattr(cache, "cache_allocators"):
        return [one.layer_type for one in cache.cache_allocators.values()]
    windows = {cache.layer_index_to_group_indices[layer][0]: window for layer, window in _windows(cache).items()}
    return ["sliding_attention" if windows[group] > 1 else "full_attention" for group in range(len(windows))]


def _windows(cache: Any) -> dict[int, int]:
    """The window of each layer, 1 for none, of versions before 5.24."""
    windows = cache.sliding_windows
    return dict(windows.items() if isinstance(windows, Mapping) else enumerate(windows))


def _pages_of(cache: Any) -> Any:
    """A layer's index -> (keys, values, window, group)."""
    if hasattr(cache, "cache_allocators"):

        def of(layer: int) -> tuple[Tensor, Tensor, int, int]:
            allocator = cache.layer_to_allocator[layer]
            keys, values = allocator._kv_token_views[layer]
            return keys, values, int(getattr(allocator, "sliding_window", 0) or 0), int(allocator.index)

        return of
    windows = _windows(cache)

    def layer_pages(layer: int) -> tuple[Tensor, Tensor, int, int]:
        group, inside = cache.layer_index_to_group_indices[layer]
        window = windows[layer]
        return cache.key_cache[inside], cache.value_cache[inside], window if window > 1 else 0, int(group)

    return layer_pages
