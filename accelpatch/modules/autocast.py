"""What torch.autocast does to a product's input: kernels of our own are not on its list."""

from __future__ import annotations

import torch
from torch import Tensor

CAST = (torch.float32, torch.bfloat16, torch.float16)  # float64 stays, as in torch


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast, where it is on, gives the input of torch.nn.functional.linear."""
    kind = x.device.type
    if x.dtype not in CAST or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
