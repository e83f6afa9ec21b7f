"""The GEMV of my_gemv.py in Triton, for GPUs of AMD and NVIDIA.

accelpatch run MODEL --plugin examples/my_gemv_triton.py --recipe FILE, of my_gemv.yaml with `kernel: my_gemv_triton`
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

import accelpatch
from accelpatch.device import Device
from accelpatch.kernels.spec import Spec

ROWS, BLOCK_N, BLOCK_K = 8, 4, 512


@triton.jit
def kernel(x, w, bias, y, n, k, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x, y = x + tl.program_id(1).to(tl.int64) * k, y + tl.program_id(1).to(tl.int64) * n
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, k, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)  # the tail of any k is masked
        b = tl.load(w + rows[:, None] * k + at[None, :], mask=(rows[:, None] < n) & (at[None, :] < k), other=0.0)
        sums += a[None, :] * b.to(tl.float32)
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=rows < n)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why my_gemv_triton cannot run a call; None where it can."""
    if device.kind != "cuda" or spec.dtype not in (torch.bfloat16, torch.float16):
        return f"it runs on GPUs, in bfloat16 and float16, not in {spec.dtype} on {device.name}"
    return None if spec.sizes["M"] <= ROWS else f"{spec.sizes['M']} rows are more than the {ROWS} that it takes"


@accelpatch.implementation("linear", name="my_gemv_triton", why_not=why_not)
def my_gemv_triton(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, w, (n, k) = x.reshape(-1, w.shape[1]).contiguous(), w.contiguous(), w.shape
    y = x.new_empty(*x.shape[:-1], n)
    if y.numel():
        kernel[(triton.cdiv(n, BLOCK_N), len(rows))](rows, w, bias, y, n, k, bias is not None, BLOCK_N, BLOCK_K)
    return y
