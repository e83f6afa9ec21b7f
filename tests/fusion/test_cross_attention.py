"""Attention to the encoder's tokens by the kernel of decode attention: as torch's own, and the cache stays as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from accelpatch.fusion.cross_attention import StepAttention
from accelpatch.fusion.cross_step import CrossCache, CrossStep
from accelpatch.kernels import dispatch
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.ops.attention import decode_attention
from tests.support.interpreted import DEVICE, HERE, _anywhere, here, interpret, needs_triton

__all__ = ["_anywhere"]
ROWS, HEADS, LENGTH, SIZE = 2, 2, 300, 16  # two splits of the keys


@pytest.mark.parametrize("by", ["torch", pytest.param("triton", marks=[needs_triton, here])])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_to_the_encoder(by: str, masked: bool) -> None:
    """Rows that end at different tokens, with a hidden one in between; in a second of two layers."""
    torch.manual_seed(0)
    held = torch.randn(2, 2, ROWS, HEADS, LENGTH, SIZE, device=DEVICE)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64, device=DEVICE)
    mask[1, 200:] = mask[1, 3] = 0
    q, before = torch.randn(ROWS, HEADS * SIZE, device=DEVICE), held.clone()
    cross = CrossCache(held, mask)
    cross.show()
    assert cross.ends.tolist() == [LENGTH - 1, 199]
    shape = AttentionShape(HEADS, HEADS, SIZE, 0.25, torch.zeros(SIZE // 2, device=DEVICE))
    zeros = torch.zeros(ROWS, 1, dtype=torch.int64, device=DEVICE)
    step = CrossStep(zeros, zeros[:, 0], mask, None, cross)
    attention = StepAttention(SimpleNamespace(own=shape, cross=shape), step, 1, masked)
    with pytest.MonkeyPatch.context() as patch:
        if by == "triton":
            run = decode_attention.by_triton
            patch.setattr(dispatch, "run", lambda op, spec, device, args: run(*args))
        made = attention.cross(q)
    shown = mask.bool()[:, None, None] if masked else None
    due = functional.scaled_dot_product_attention(
        q.view(ROWS, HEADS, 1, SIZE), before[1, 0], before[1, 1], attn_mask=shown, scale=0.25
    )
    torch.testing.assert_close(made, due.reshape(ROWS, -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(held, before)


@pytest.mark.skipif(HERE, reason="it runs in this process")
@needs_triton
def test_through_the_interpreter() -> None:
    interpret(__file__)
