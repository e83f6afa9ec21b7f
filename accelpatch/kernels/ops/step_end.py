"""End of a decode step, one launch on a GPU: the logits for the sampler, and advancing to the next token.

scores[B, V] = logits[B, V] in float32
mask[b, slot[0]] = 1 for every row of mask[B, L]: later steps attend to this step's token
slot[0] += 1, positions[b] += 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.dispatch import require
from accelpatch.kernels.triton import launch


def reference_(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> None:
    """In plain torch."""
    scores.copy_(logits)
    mask.index_fill_(1, slot, 1)
    slot.add_(1)
    positions.add_(1)


def end_step_(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> None:
    """logits[B, V] of any float dtype; scores[B, V] float32; slot[1], positions[B, 1], mask[B, L] int64; 0 <= slot < L.

    Writes all but logits. Raises KernelError for shapes that do not fit together.
    """
    rows = scores.shape[0]
    fit = logits.shape == scores.shape and positions.shape == (rows, 1) and mask.shape[0] == rows and slot.shape == (1,)
    require(fit, "step_end", f"logits {list(logits.shape)} and mask {list(mask.shape)} are not of {rows} rows")
    whole = all(one.dtype == torch.int64 and one.is_contiguous() for one in (slot, positions, mask))
    require(whole and scores.dtype == torch.float32 and scores.is_contiguous(), "step_end",
            "scores are float32, slot, positions and mask int64, all of them contiguous")  # fmt: skip
    here = logits.device == scores.device and scores.device.type != "cpu"
    if not here or launch.why_not(probe(scores.device), logits.dtype):
        reference_(logits, scores, slot, positions, mask)
        return
    from accelpatch.kernels.triton import step_end as kernel

    kernel.end_step_(logits, scores, slot, positions, mask)
