"""A float weight[N, K] as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from accelpatch.kernels.layouts.layout import Weight, concatenated


class Plain(NamedTuple):
    """w[N, K], float."""

    w: Tensor

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
        return Plain, self.k, self.w.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.w.nbytes

    @classmethod
    def pack(cls, weight: Tensor) -> Plain:
        """The weight itself."""
        return cls(weight)

    def unpack(self) -> Tensor:
        """The weight itself."""
        return self.w

    def arguments(self) -> tuple[Any, ...]:
        """What `gemv` takes between x and the bias."""
        return (self.w,)

    def launch(self) -> Weight:
        """The arguments of a launch of gemv; a copy where the weight has gaps."""
        whole = self.w.contiguous()
        return Weight("gemv", self.n, self.k, whole, prefetchable=whole is self.w)

    @classmethod
    def concat(cls, parts: Sequence[Plain]) -> Plain:
        """Row after row; the parts become views."""
        return cls(concatenated([one.w for one in parts]))
