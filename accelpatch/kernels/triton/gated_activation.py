"""act(gate) * up, one block of a row per program; rows may be strided; see ../ops/activation/gated_activation.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.launch import cdiv, dependent, on

BLOCK = 1024
CODES = {
    "silu": 0, "swish": 0, "gelu": 1, "gelu_tanh": 2, "gelu_pytorch_tanh": 2, "relu": 3,
    "relu2": 4, "quick_gelu": 5, "sigmoid": 6,
}  # fmt: skip


@triton.jit
def _activated(x, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    if CODE == 0:
        return x / (1.0 + tl.exp(-x))
    if CODE == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if CODE == 2:  # 1 + tanh(t) = 2 sigmoid(2 t)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if CODE == 5:
        return x / (1.0 + tl.exp(-1.702 * x))
    if CODE == 6:
        return 1.0 / (1.0 + tl.exp(-x))
    positive = tl.where(x < 0, 0.0, x)
    return positive * positive if CODE == 4 else positive


@triton.jit
def gelu_of_16_bits(x):  # type: ignore[no-untyped-def]
    """gelu(x) in float32 within 2e-7 |x|, for what is then rounded to 16 bits: a third of the instructions of erf.

    Source: Abramowitz and Stegun 1964, 7.1.26.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * tail * tl.exp(-z * z)  # erfc(z) / 2
    return x * tl.where(x < 0, half, 1.0 - half)


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    gate, up, y, width, gate_stride, up_stride, CODE: tl.constexpr, DEPENDENT: tl.constexpr, SIZE: tl.constexpr
):
    overlap(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < width
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    act = _activated(x.to(tl.float32), CODE).to(x.dtype).to(tl.float32)
    value = act * tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + columns, value.to(x.dtype), mask=inside)


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As the operation: act(gate) * up, contiguous."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        width = gate.shape[-1] if gate.dim() else 1
        gate, up = (_rows(tensor, width) for tensor in (gate, up))
        overlapped, options = dependent(y)
        with on(y):
            _block[(gate.shape[0], cdiv(width, BLOCK))](
                gate, up, y, width, gate.stride(0), up.stride(0), CODES[activation], overlapped, BLOCK, **options
            )
    return y


def _rows(tensor: Tensor, width: int) -> Tensor:
    """[M, width] with contiguous rows; a view where possible."""
    rows = tensor.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()
