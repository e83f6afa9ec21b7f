"""What attention over pages sees of transformers' PagedAttentionCache in one call of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from accelpatch.kernels.paged_rows import PagedRows

PAGES = "accelpatch_pages"  # the argument of attention that holds a PagedCache


@dataclass(frozen=True)
class PagedLayer:
    """One layer's keys and values[S, Hkv, D], its window (0: none), and which token of the call attends to which."""

    keys: Tensor
    values: Tensor
    window: int
    rows: PagedRows


class PagedCache(PagedAttentionCache):
    """Stands for a PagedAttentionCache in one call: keys and values are written and read by attention alone.

    It is of transformers' class, for which the model makes no masks. layers: index of a layer -> (its keys and values
    [S, Hkv, D], its window, 0 for none, and the index of its group); groups: each group's rows.
    """

    def __init__(self, layers: Callable[[int], tuple[Tensor, Tensor, int, int]], groups: Sequence[PagedRows]):
        self._layers, self._groups = layers, groups

    def of(self, layer: int) -> PagedLayer:
        """The layer's part."""
        keys, values, window, group = self._layers(layer)
        return PagedLayer(keys, values, window, self._groups[group])

    @property
    def rows(self) -> PagedRows | None:
        """Those of all layers; None where layers are of several groups."""
        return self._groups[0] if len(self._groups) == 1 else None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, kwargs: Any = None, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' interface since 5.24: the new keys and values alone; attention finds this object in kwargs."""
        kwargs[PAGES] = self
        return key_states, value_states
