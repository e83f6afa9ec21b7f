"""LoRA adapters beside a pack, which a native step adds to the products of its weight (cpu/low_rank.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.cpu.native_library import ROWS, Linear, pointer


@dataclass(frozen=True, eq=False)
class PackAdapters:
    """y[M, N] += (x[M, K] @ down^T) @ up^T. down[R, K], the scaling multiplied in, and up[N, R]: float32, contiguous.

    LoRA: https://arxiv.org/abs/2106.09685
    """

    down: Tensor
    up: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> PackAdapters | None:
        """Several adapters, each (down, up) of any float dtype, as one; None for none."""
        if not pairs:
            return None
        downs, ups = zip(*pairs, strict=True)
        return cls(torch.cat(downs).detach().float().contiguous(), torch.cat(ups, 1).detach().float().contiguous())

    @cached_property
    def blocks(self) -> Tensor:
        """up as the step reads it: float32 [ceil(N / 16), R, 16], zeros for rows beyond N."""
        padded = functional.pad(self.up, (0, 0, 0, -len(self.up) % ROWS))
        return padded.view(-1, ROWS, self.up.shape[1]).transpose(1, 2).contiguous()

    def put_into(self, weight: Linear) -> Linear:
        """The C structure of the weight with these adapters; it points into this object's tensors."""
        weight.rank, weight.down, weight.up = len(self.down), pointer(self.down), pointer(self.blocks)
        return weight

    def add_(self, y: Tensor, x: Tensor) -> Tensor:
        """The formula above by torch, in y."""
        return y.addmm_(functional.linear(x, self.down), self.up.t())
