"""A GEMV of one's own in a model: gemv.hip on a GPU of AMD or NVIDIA, gemv.cpp on a CPU, both beside this file.

accelpatch run smollm2-135m --recipe examples/my_gemv.yaml --plugin examples/my_gemv.py --prompt "The sea is"
"""

from __future__ import annotations

import torch
from torch import Tensor

import accelpatch
from accelpatch.device import Device
from accelpatch.kernels.spec import Spec

ROWS = 8  # of x: torch's GEMM reads the weight once for more of them


def on_gpu(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, n: int, k: int) -> None: ...
def on_cpu(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, m: int, n: int, k: int) -> None: ...


NAMES = {torch.bfloat16: "gemv_bf16", torch.float16: "gemv_fp16"}
GPU = {dtype: accelpatch.module("gemv.hip", name=name)(on_gpu) for dtype, name in NAMES.items()}
CPU = {
    dtype: accelpatch.module("gemv.cpp", name=name, options=["-march=native"])(on_cpu)
    for dtype, name in {**NAMES, torch.float32: "gemv_fp32"}.items()
}


def why_not(spec: Spec, device: Device) -> str | None:
    """Why my_gemv cannot run a call; None where it can."""
    if spec.dtype not in (GPU if device.kind == "cuda" else CPU):
        return f"it has no kernel for {spec.dtype}"
    return None if spec.sizes["M"] <= ROWS else f"{spec.sizes['M']} rows are more than the {ROWS} that it takes"


@accelpatch.implementation("linear", name="my_gemv", why_not=why_not)
def my_gemv(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, w, (n, k) = x.reshape(-1, w.shape[1]).contiguous(), w.contiguous(), w.shape
    bias, y = None if bias is None else bias.to(x.dtype), x.new_empty(*x.shape[:-1], n)
    if y.numel() and x.is_cuda:
        GPU[x.dtype]([-(-n // 8), len(rows)], [32, 8], rows, w, bias, y, n, k)
    elif y.numel():
        CPU[x.dtype](rows, w, bias, y, len(rows), n, k)
    return y
