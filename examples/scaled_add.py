"""An operation of one's own on CPUs and GPUs, by docs/operations.md: y = x + factor * b, with b broadcast to x.

python examples/scaled_add.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import accelpatch


def reference(x: Tensor, b: Tensor, factor: float) -> Tensor:
    """In plain torch, in the precision of x: what kernels are compared with, in float64."""
    return x + factor * b


@accelpatch.module("scaled_add.cpp", name="scaled_add")
def on_cpu(x, b, y, rows, columns, x_row, x_column, b_row, b_column, factor): ...


@accelpatch.module("scaled_add.hip", name="scaled_add")
def on_gpu(x, b, y, rows, columns, x_row, x_column, b_row, b_column, factor): ...


def run(x: Tensor, b: Tensor, factor: float) -> Tensor:
    """x[..., columns] + factor * b, contiguous, for float32 tensors on any one device; neither is copied."""
    wide, other = x, b.expand(x.shape)
    if x.dim() != 2:  # rows of all leading dimensions, copied where no strides have them
        wide, other = x.reshape(-1, x.shape[-1]), other.reshape(-1, x.shape[-1])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    numbers = (*wide.shape, *wide.stride(), *other.stride(), factor)
    if y.numel() and x.is_cuda:
        on_gpu([-(-y.numel() // 256)], [256], wide.data_ptr(), other.data_ptr(), y, *numbers)
    elif y.numel():
        on_cpu(wide.data_ptr(), other.data_ptr(), y, *numbers)
    return y


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, b = torch.randn(1000, 300, device=device).t(), torch.randn(1000, device=device)
    print(f"{device}: largest difference {(run(x, b, 0.5) - reference(x, b, 0.5)).abs().max().item():.1e}")
