"""LoRA adapters of a packed weight, whose products a native step adds to the linear layer's (cpu/low_rank.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.cpu.native_library import DTYPES, ROWS, Linear


@dataclass(frozen=True, eq=False)
class PackAdapters:
    """y[M, N] += (x[M, K] @ down^T) @ up^T, for down[R, K], the scaling multiplied in, and up[N, R].

    data: one after the other down and `blocks`, float32 or bfloat16. LoRA: https://arxiv.org/abs/2106.09685
    """

    data: Tensor
    rank: int
    n: int
    k: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> PackAdapters | None:
        """Several adapters, each (down, up) of any float dtype, as one; None for none. Factors that are all bfloat16
        stay so, others become float32."""
        if not pairs:
            return None
        downs, ups = zip(*pairs, strict=True)
        dtype = torch.bfloat16 if {one.dtype for one in (*downs, *ups)} == {torch.bfloat16} else torch.float32
        down, up = torch.cat(downs).detach().to(dtype), torch.cat(ups, 1).detach().to(dtype)
        padded = functional.pad(up, (0, 0, 0, -len(up) % ROWS))
        blocks = padded.view(-1, ROWS, up.shape[1]).transpose(1, 2)
        return cls(torch.cat([down.flatten(), blocks.flatten()]), *down.shape[:1], *up.shape[:1], *down.shape[1:])

    @property
    def down(self) -> Tensor:
        """[R, K]."""
        return self.data[: self.rank * self.k].view(self.rank, self.k)

    @property
    def blocks(self) -> Tensor:
        """up as the step reads it: [ceil(N / 16), R, 16], zeros for rows beyond N."""
        return self.data[self.rank * self.k :].view(-1, self.rank, ROWS)

    def put_into(self, weight: Linear) -> Linear:
        """The C structure of the weight with these adapters; it points into this object's tensors."""
        weight.rank, weight.factors = self.rank, DTYPES[self.data.dtype]
        weight.down, weight.up = self.down.data_ptr(), self.blocks.data_ptr()
        return weight

    def add_(self, y: Tensor, x: Tensor) -> Tensor:
        """The formula above by torch, in y, all float32."""
        up = self.blocks.transpose(1, 2).reshape(-1, self.rank)[: self.n]
        return y.addmm_(functional.linear(x, self.down.float()), up.float().t())
