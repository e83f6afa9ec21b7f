"""End of a decode step, one launch on a GPU: the logits for the sampler, and advancing to the next token.

scores[B, V] = logits[B, V] in float32
mask[b, slot[b]] = 1 for every row of mask[B, L]: later steps attend to this step's token
slot[b] += 1, positions[b] += 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "step_end"


def reference_(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> None:
    """In plain torch."""
    scores.copy_(logits)
    mask.scatter_(1, slot[:, None], 1)
    slot.add_(1)
    positions.add_(1)


def end_step_(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> None:
    """logits[B, V] of any float dtype; scores[B, V] float32; slot[B], positions[B, 1], mask[B, L] int64; 0 <= slot < L.

    Writes all but logits. Raises KernelError for shapes that do not fit together.
    """
    whole = scores.is_contiguous() and all(one.is_contiguous() for one in (slot, positions, mask))
    require(whole, OP, "scores, slot, positions and mask are contiguous")
    dispatch.run(OP, spec, scores.device, (logits, scores, slot, positions, mask))


def spec(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for shapes and dtypes that do not fit together."""
    rows = scores.shape[0]
    fit = (
        logits.shape == scores.shape
        and positions.shape == (rows, 1)
        and mask.shape[0] == rows
        and slot.shape == (rows,)
    )
    require(fit, OP, f"logits {list(logits.shape)} and mask {list(mask.shape)} are not of {rows} rows")
    whole = all(one.dtype == torch.int64 for one in (slot, positions, mask)) and scores.dtype == torch.float32
    require(whole, OP, "scores are float32, slot, positions and mask int64")
    options = {"one_device": logits.device == scores.device}
    return Spec(OP, {"B": rows, "V": scores.shape[1]}, logits.dtype, options=options)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if not spec.options.get("one_device", True):
        return "logits and scores lie on two devices"
    return launch.why_not(device, spec.dtype)


def by_triton(logits: Tensor, scores: Tensor, slot: Tensor, positions: Tensor, mask: Tensor) -> None:
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton import step_end as kernel

    kernel.end_step_(logits, scores, slot, positions, mask)


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(reference_, dispatch.anywhere),
}
KERNELS = {OP: Kernel(end_step_, reference_, spec, IMPLEMENTATIONS)}
