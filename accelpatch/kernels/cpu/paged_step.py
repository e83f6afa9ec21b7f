"""A decode step as one native call whose keys and values lie in pages, as those of continuous batching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import MAX_BATCH, PLAIN, check, native, pointer, threads

LONGEST = 16384  # tokens of a text; the step holds room for their partial results
PAGES = 4  # the format of the cache, as numbered in the C interface


@dataclass
class PagedStep(DecodeStep):
    """As DecodeStep, for up to `most` texts in a call, and without parts.

    keys, values: of each layer [S, kv_heads, head_dim], float32, contiguous, where the tokens of a text lie in any
    order; the step writes into them.
    """

    most: ClassVar[int] = MAX_BATCH

    def __post_init__(self) -> None:
        self.rows, self.length, self.pages = MAX_BATCH, min(len(self.keys[0]), LONGEST), len(self.keys[0])
        self._create()

    def run(self, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, index: Tensor) -> Tensor:
        """logits float32 [B, vocabulary] of a token of each text.

        tokens, slots, starts, positions: int64 [B], index: int64 [N], on the CPU. Text b attends to the tokens
        index[starts[b]] .. index[slots[b]] of the pages, the last of which is where its new token's keys and values go.
        Raises IndexError, as an embedding does, for a token that it has no row for.
        """
        places = [one.contiguous() for one in (tokens, slots, starts, positions, index)]
        if any(one.dtype != torch.int64 or one.device.type != "cpu" for one in places):
            raise KernelError("tokens, slots, starts, positions and index are int64 on the CPU")
        if any(one.shape != tokens.shape for one in places[:4]):
            raise KernelError(f"slots, starts and positions are of shape {list(tokens.shape)}, as tokens are")
        logits = torch.empty(len(tokens), self.head.n, **PLAIN)
        status = native().ap_step_run_pages(
            self.handle, len(tokens), *map(pointer, places), len(index), pointer(logits), threads()
        )
        if status and not bool(((tokens >= 0) & (tokens < self.embedding.n)).all()):
            raise IndexError(f"a token is out of range: {tokens.tolist()}, and there are {self.embedding.n} rows")
        check(status, f"a step of {len(tokens)} texts, of at most {self.rows} with {self.length} tokens each")
        return logits

    def _cache_shape(self, kv_heads: int) -> tuple[int, ...]:
        return self.pages, kv_heads, self.shape.head_dim

    def _cache_format(self, index: int) -> int:
        return PAGES
