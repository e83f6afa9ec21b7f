"""8-bit weights in the order of their rows, with scales: int8, and the two forms of float8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelpatch.kernels.layouts.layout import Weight, concatenated, nbytes_of

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)  # in the order of the device library's form argument


class ScaledRows(NamedTuple):
    """w[N, K] int8 or float8, scale[N, G] float."""

    w: Tensor
    scale: Tensor

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return int(self.w.shape[0])

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return int(self.w.shape[1])

    @property
    def part(self) -> str:
        """All rows in their order."""
        return "all"

    @property
    def tiled(self) -> bool:
        """Whether rows lie in tiles."""
        return False

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return type(self), self.k, self.w.dtype, self.scale.shape[1], self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return nbytes_of(self)

    @classmethod
    def pack(cls, q: Tensor, scale: Tensor) -> ScaledRows:
        """The canonical tensors themselves."""
        return cls(q, scale)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """q and scale."""
        return self.w, self.scale

    def arguments(self) -> tuple[Any, ...]:
        """What the operation takes between x and the bias."""
        return tuple(self)

    def launch(self) -> Weight:
        """The arguments of a launch of gemv_int8, or gemv_fp8, for one scale a row."""
        fp8 = self.w.dtype in FP8
        whole, rows = self.w.contiguous(), self.scale.to(torch.float32).contiguous()
        function, form = ("gemv_fp8", FP8.index(self.w.dtype)) if fp8 else ("gemv_int8", 0)
        return Weight(function, self.n, self.k, whole, form, rows, prefetchable=whole is self.w)

    @classmethod
    def concat(cls, parts: Sequence[ScaledRows]) -> ScaledRows:
        """Row after row; the parts become views."""
        return cls(concatenated([one.w for one in parts]), concatenated([one.scale for one in parts]))
