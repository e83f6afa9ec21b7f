"""LoRA adapters inside a linear layer of the device library: their tensors and launch arguments (gemv/low_rank.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.kernels.compiling.gpu_libraries import FUNCTIONS

SUFFIX = "_low_rank"  # of the name of a function of the device library with adapters
STEP = 8  # the ranks of a part are a multiple of this
MOST_RANKS = 512
# Of each rank: two buffers of 8 pieces of 8 tokens; after all of these, numbers of which the first is a counter.
WORDS, NUMBERS = 2 * 8 * 8, 4


@dataclass(frozen=True, eq=False)
class LowRank:
    """Adapters of a weight w[N, K], whose rows fall into up to three parts: w' = w + up down, part by part.

    down[parts * rank, K], which includes the scaling, and up[N, rank], contiguous and in x's dtype; rank is a multiple
    of STEP. starts: the first row of each part. words: of `new_words`, for launches on one stream at a time, each of
    which leaves them ready for the next; None: each launch gets words of its own, which takes a further launch.
    """

    down: Tensor
    up: Tensor
    starts: tuple[int, ...] = (0,)
    words: Tensor | None = None

    @property
    def rank(self) -> int:
        """Columns of `up`."""
        return self.up.shape[1]

    @property
    def ranks(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]

    def new_words(self) -> Tensor:
        """int32[128 * ranks + 4] on the weights' device: NO_LOW for sums that are missing, then zeros."""
        words = torch.full((WORDS * self.ranks + NUMBERS,), -1, dtype=torch.int32, device=self.down.device)
        words[-NUMBERS:] = 0
        return words

    def wide_up(self) -> Tensor:
        """up as one matrix of all parts, [N, ranks], with zeros for the parts that a row does not belong to."""
        wide = self.up.new_zeros(len(self.up), self.ranks)
        for part, (begin, end) in enumerate(zip(self.starts, (*self.starts[1:], len(self.up)), strict=True)):
            wide[begin:end, part * self.rank : (part + 1) * self.rank] = self.up[begin:end]
        return wide

    def tensors(self) -> dict[str, Tensor | None]:
        """The fields of GemvArgs that are pointers; the tensors must live until the launch."""
        return {"down": self.down, "up": self.up, "low": self.new_words() if self.words is None else self.words}


def sizes_of(low: LowRank | None) -> dict[str, int]:
    """The fields of GemvArgs that are sizes; none without adapters."""
    if low is None:
        return {}
    second, third = (*low.starts[1:], len(low.up), len(low.up))[:2]
    return {"rank": low.rank, "ranks": low.ranks, "second_part": second, "third_part": third}


def concatenated(parts: Sequence[tuple[Tensor, Tensor] | None], sizes: Sequence[int], like: Tensor) -> LowRank:
    """Adapters of neighbouring parts of one weight, of `sizes` rows each; at least one part has some.

    parts: (down[r, K], which includes the scaling; up[size, r]), or None for a part without. like: for dtype and
    device. Ranks are padded with zeros to the largest, in multiples of STEP.
    """
    rank = -(-max(up.shape[1] for _, up in filter(None, parts)) // STEP) * STEP
    k = next(down.shape[1] for down, _ in filter(None, parts))
    downs, ups = like.new_zeros(len(parts), rank, k), like.new_zeros(sum(sizes), rank)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    for part, (begin, size, one) in enumerate(zip(starts, sizes, parts, strict=True)):
        if one is not None:
            down, up = one
            downs[part, : len(down)] = down.to(like.dtype)
            ups[begin : begin + size, : up.shape[1]] = up.to(like.dtype)
    return LowRank(downs.flatten(0, 1), ups, tuple(starts))


def function_why_not(function: str, ranks: int) -> str | None:
    """Why a function of the device library has no variant for this many ranks of adapters; None where it has."""
    if function + SUFFIX not in FUNCTIONS:
        return f"{function} has no form with adapters inside"
    return None if ranks <= MOST_RANKS else f"its adapters have {ranks} ranks, more than {MOST_RANKS}"
