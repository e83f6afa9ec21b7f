"""torch.autocast for accelpatch's own linear kernels, which are not on its list of operations."""

from __future__ import annotations

import torch
from torch import Tensor

CAST = (torch.float32, torch.bfloat16, torch.float16)  # float64 stays, as in torch


def autocast(x: Tensor) -> Tensor:
    """x cast to the dtype that torch.autocast, where it is enabled, would give the input of functional.linear."""
    kind = x.device.type
    if x.dtype not in CAST or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
