"""Weights of LLM.int8() (bitsandbytes) in the canonical form: w[n, k] = code[n, k] SCB[n] / 127.

Its activations are rounded too, but for columns with outliers; here they stay float, so that outliers need nothing.
Source: Dettmers et al. 2022, arXiv:2208.07339, and bitsandbytes 0.50, whose checkpoints the tests read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.quant.weight import QuantizedWeight

LARGEST = 127


def llm_int8(tensors: Mapping[str, Tensor | None], n: int, k: int) -> QuantizedWeight:
    """A linear layer[n, k] with weight int8 [n, k] and SCB[n], the largest magnitude of each row."""
    q, largest = tensors.get("weight"), tensors.get("SCB")
    if q is None or largest is None:
        raise KernelError(f"{'weight' if q is None else 'SCB'} is missing")
    if q.dtype != torch.int8 or list(q.shape) != [n, k]:
        raise KernelError(f"weight is {q.dtype} {list(q.shape)}, and torch.int8 {[n, k]} belongs here")
    if not largest.is_floating_point() or largest.numel() != n:
        raise KernelError(f"SCB is {largest.dtype} {list(largest.shape)}, and a float [{n}] belongs here")
    scale = largest.float().reshape(n, 1) / LARGEST
    bad = ~(scale.isfinite() & (scale >= 0)) | ((scale == 0) & q.bool().any(dim=1, keepdim=True))
    if bool(bad.any()):
        row = int(bad.flatten().nonzero()[0])
        raise KernelError(f"SCB[{row}] is {float(largest.flatten()[row])}, which is no magnitude of its row")
    return QuantizedWeight(q.detach(), scale, None)
