"""Beam search's reordering of a static cache: all layers at once where their tensors are parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accelpatch.kernels.layouts.kv_states import tensors_of


class RowOrder:
    """The new order of the rows of a cache, which transformers asks for layer after layer.

    Layers have keys, values (States) and maybe `block`[..., B, Hkv, capacity, D], of which the tensors of all of them
    are parts: then nothing is copied until the last layer was asked for, and all are in one launch. Whoever reads or
    moves a cache in between calls `flush` first.
    """

    def __init__(self) -> None:
        self._layers: Sequence[Any] = ()
        self._rows: Tensor | None = None
        self._asked = self._length = 0  # the first layers wait for an order of so many tokens

    def ask(self, layers: Sequence[Any], place: int, rows: Tensor, length: int) -> None:
        """Row b of the first `length` slots of the layer at `place` becomes its row rows[b], int64."""
        same = layers is self._layers and rows is self._rows and (place, length) == (self._asked, self._length)
        if not same:
            self.flush()
        block = getattr(layers[place], "block", None)
        if block is None or place != self._asked:
            return _reorder_layer(layers[place], rows, length)
        self._layers, self._rows, self._asked, self._length = layers, rows, place + 1, length
        if self._asked == len(layers):
            self._forget()
            _reorder(block, block.dim() - 4, rows, length)
        return None

    def flush(self) -> None:
        """Reorder the layers that wait."""
        layers, rows = self._layers[: self._asked], self._rows
        self._forget()
        for layer in layers:
            assert rows is not None
            _reorder_layer(layer, rows, self._length)

    def _forget(self) -> None:
        self._layers, self._rows, self._asked = (), None, 0


def _reorder_layer(layer: Any, rows: Tensor, length: int) -> None:
    for tensor in (*tensors_of(layer.keys), *tensors_of(layer.values)):
        _reorder(tensor, 0, rows, length)


def _reorder(tensor: Tensor, dim: int, rows: Tensor, length: int) -> None:
    filled = tensor.narrow(dim + 2, 0, length)
    filled.copy_(filled.index_select(dim, rows.to(tensor.device)))
