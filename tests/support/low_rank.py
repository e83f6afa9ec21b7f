"""Adapters of the HIP gemv kernels: made, launched, and what they compute, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.hip_gemv import Packed


@dataclass(frozen=True)
class Adapters:
    """down[parts * rank, K] and up[N, rank] of a weight whose rows fall into parts, which begin at `starts`."""

    down: Tensor
    up: Tensor
    starts: Sequence[int]
    low: Tensor

    def arguments(self) -> dict[str, int]:
        """Those of a launch."""
        second, third = (*self.starts[1:], *[len(self.up)] * 2)[:2]
        pointers = {name: getattr(self, name).data_ptr() for name in ("down", "up", "low")}
        sizes = {"rank": self.up.shape[1], "ranks": len(self.down), "second_part": second, "third_part": third}
        return pointers | sizes

    @property
    def reset(self) -> bool:
        """Whether the words are as a launch must find them."""
        return bool((self.low[:-4] == -1).all() and (self.low[-4:] == 0).all())

    def beside(self, dense: Tensor) -> Tensor:
        """The weight w + up down that a product with these adapters has, in float64."""
        rank, ends = self.up.shape[1], (*self.starts[1:], len(self.up))
        more = torch.zeros_like(dense, dtype=torch.float64)
        for part, (begin, end) in enumerate(zip(self.starts, ends, strict=True)):
            more[begin:end] = self.up[begin:end].double() @ self.down[part * rank : (part + 1) * rank].double()
        return dense.double() + more


def adapters(p: Packed, dtype: torch.dtype, rank: int, starts: Sequence[int], device: Any = "cpu") -> Adapters:
    """Random ones, as large as the weight's own rows."""
    ranks = rank * len(starts)
    down = (torch.randn(ranks, p.k) / p.k**0.5).to(device, dtype)
    up = (torch.randn(p.n, rank) / rank**0.5).to(device, dtype)
    low = torch.full((ranks * 8 + 4,), -1, dtype=torch.int32, device=device)
    low[-4:] = 0
    return Adapters(down, up, tuple(starts), low)
