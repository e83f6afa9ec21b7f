"""The order of preference of flash_attention's implementations, by device and dtype.

On Hopper cuDNN's kernel was the fastest of torch's for 16 bits; on AMD, ROCm's documentation prefers AOTriton, which
torch runs as its flash back end. Every order ends with `eager`, which takes everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from accelpatch.device import Device
from accelpatch.kernels.spec import Spec

HALVES = (torch.bfloat16, torch.float16)

#: name of a kind of device and dtype -> implementations, the preferred one first
ORDERS: Mapping[str, Sequence[str]] = {
    "cpu": ("sdpa", "eager"),
    "sm_90": ("sdpa_cudnn", "sdpa_flash", "triton", "sdpa", "eager"),
    "nvidia": ("sdpa_flash", "triton", "sdpa_cudnn", "sdpa", "eager"),
    "amd": ("sdpa_flash", "triton", "sdpa", "eager"),
    "wide": ("sdpa_efficient", "sdpa", "triton", "eager"),  # float32 and float64 on a GPU
}


def order(spec: Spec, device: Device) -> Sequence[str]:
    """Names of implementations, the preferred one first; the last one takes every spec on every device."""
    if device.kind != "cuda":
        return ORDERS["cpu"]
    if spec.dtype not in HALVES:
        return ORDERS["wide"]
    return ORDERS.get(device.arch, ORDERS[device.vendor])
