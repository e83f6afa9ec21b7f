"""What an encoder gave to a decode step: the keys and values that its layers attend to, which no step changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import pointer


@dataclass(frozen=True, eq=False)
class StepEncoded:
    """states: keys and values of each layer, each [texts, heads, S, head_dim], float32, contiguous.

    text: int64 [B], the text of each row. ends: int64 [texts], how many tokens of each text are attended to, at least
    one. mask: float32 [texts, S], added to the scores; None for none.
    """

    states: Sequence[tuple[Tensor, Tensor]]
    text: Tensor
    ends: Tensor
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """S."""
        return int(self.states[0][0].shape[2])

    def why_not(self, index: int, width: int, head_dim: int, rows: int) -> str | None:
        """Why the layer at `index`, of `width` columns in this attention, cannot attend to it in a step of `rows`."""
        texts, due = len(self.ends), (len(self.ends), width // head_dim, self.length, head_dim)
        for one in self.states[index]:
            if tuple(one.shape) != due or one.dtype != torch.float32 or not one.is_contiguous():
                return f"what the encoder gave is {one.dtype} {list(one.shape)}, not contiguous float32 {list(due)}"
        if self.text.shape != (rows,) or any(one.dtype != torch.int64 for one in (self.text, self.ends)):
            return f"the texts of {list(self.text.shape)} rows are given, not of {rows}, or not in int64"
        mask = self.mask
        if mask is not None and (mask.dtype != torch.float32 or tuple(mask.shape) != (texts, self.length)):
            return f"the encoder's mask is {mask.dtype} {list(mask.shape)}, not float32 {[texts, self.length]}"
        return None

    def struct(self) -> native_library.Encoded:
        """For the C interface; it points into these tensors."""
        tensors = (self.text, self.ends, self.mask)
        return native_library.Encoded(len(self.ends), self.length, *map(pointer, tensors))
