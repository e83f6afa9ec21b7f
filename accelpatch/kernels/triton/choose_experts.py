"""The experts of a token, a program a token; see ../ops/experts/choose_experts.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.launch import dependent, on


@triton.jit
def _token(  # type: ignore[no-untyped-def]
    logits, ids, weights, experts, chosen,
    NORMALISE: tl.constexpr, DEPENDENT: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    overlap(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, EXPERTS)
    score = tl.load(logits + token * experts + number, mask=number < experts, other=float("-inf")).to(tl.float32)
    score = tl.where(score != score, float("inf"), score)  # NaN is the largest, as for torch
    most = tl.max(score, 0)
    weight = tl.exp(score - most)
    weight = weight / tl.sum(weight, 0)
    place = tl.arange(0, CHOSEN)
    kept, value = tl.zeros([CHOSEN], tl.int32), tl.zeros([CHOSEN], tl.float32)
    open = number < experts
    for at in range(chosen):
        best = tl.max(tl.where(open, score, float("-inf")), 0)
        first = tl.min(tl.where(open & (score == best), number, EXPERTS), 0)
        kept = tl.where(place == at, first, kept)
        value = tl.where(place == at, tl.sum(tl.where(number == first, weight, 0.0), 0), value)
        open = open & (number != first)
    if NORMALISE:
        value = value / tl.sum(value, 0)
    out = token * chosen + place
    tl.store(ids + out, kept.to(tl.int64), mask=place < chosen)
    tl.store(weights + out, value.to(weights.dtype.element_ty), mask=place < chosen)


def choose_experts(logits: Tensor, top_k: int, normalise: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    """As the operation."""
    (tokens, experts), logits = logits.shape, logits.contiguous()
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = logits.new_empty((tokens, top_k), dtype=logits.dtype if narrow else torch.float32)
    if tokens:
        overlapped, options = dependent(logits)
        with on(logits):
            _token[(tokens,)](
                logits, ids, weights, experts, top_k, normalise, overlapped, 1 << max(1, (experts - 1).bit_length()),
                1 << (top_k - 1).bit_length(), num_warps=1, **options,
            )  # fmt: skip
    return ids, weights
