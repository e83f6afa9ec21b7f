"""Beam search's reordering of a static cache: all layers at once where their tensors are parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accelpatch.kernels.layouts.kv_states import tensors_of


class RowOrder:
    """The new order of the rows of `layers`, which transformers asks for layer after layer.

    Each layer has keys, values (States) and maybe `block`[..., B, Hkv, capacity, D], of which the tensors of all layers
    are parts: then nothing is copied until the last layer was asked for, and all are in one launch. Whoever reads a
    layer in between calls `flush` first.
    """

    def __init__(self, layers: Sequence[Any]):
        blocks = {id(getattr(layer, "block", None)) for layer in layers}
        self._layers: Sequence[Any] = layers
        self._block: Tensor | None = getattr(layers[0], "block", None) if len(blocks) == 1 else None
        self._rows: Tensor | None = None
        self._asked = self._length = 0  # the first layers wait for an order of so many tokens

    def ask(self, place: int, rows: Tensor, length: int) -> None:
        """Row b of a layer's first `length` slots becomes its row rows[b], int64."""
        if self._block is None:
            return self._reorder(place, rows, length)
        if self._asked and (rows is not self._rows or place != self._asked or length != self._length):
            self.flush()
        if place != self._asked:
            return self._reorder(place, rows, length)
        self._rows, self._asked, self._length = rows, place + 1, length
        if self._asked == len(self._layers):
            self._rows, self._asked = None, 0
            _reorder(self._block, self._block.dim() - 4, rows, length)
        return None

    def flush(self) -> None:
        """Reorder the layers that wait."""
        rows, asked = self._rows, self._asked
        self._rows, self._asked = None, 0
        for place in range(asked):
            assert rows is not None
            self._reorder(place, rows, self._length)

    def _reorder(self, place: int, rows: Tensor, length: int) -> None:
        for states in (self._layers[place].keys, self._layers[place].values):
            for tensor in tensors_of(states):
                _reorder(tensor, 0, rows, length)


def _reorder(tensor: Tensor, dim: int, rows: Tensor, length: int) -> None:
    filled = tensor.narrow(dim + 2, 0, length)
    filled.copy_(filled.index_select(dim, rows.to(tensor.device)))
