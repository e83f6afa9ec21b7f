"""The order of preference of flash_attention's implementations, by device and dtype.

What `accelpatch tune attention` measured on this machine comes first; the lists below are for all others. Those of
Hopper were measured on an H100 (scripts/bench_flash.py), but for packages, which were not installed and come behind the
fastest of what was measured. On other GPUs of NVIDIA torch's own choice comes first, which is what a model has without
a patch. AMD's order follows ROCm's documentation: AITER, flash-attn, and AOTriton, which torch runs as its flash back
end. Every order ends with `eager`, which takes everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from accelpatch.device import Device
from accelpatch.kernels.ops.attention import stored as attention_stored
from accelpatch.kernels.ops.attention.mask import needs_mask
from accelpatch.kernels.spec import Spec

HALVES = (torch.bfloat16, torch.float16)
MANY = 128  # queries; with fewer torch's own choice is as fast as any

#: device, vendor or kind of dtype -> implementations, the preferred one first
ORDERS: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "sdpa", "eager"),
    "nvidia": (
        "sdpa", "flash_attn_3", "flash_attn_2", "hub", "triton", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient",
        "xformers", "eager",
    ),
    "hopper": (
        "sdpa_cudnn", "sdpa", "flash_attn_3", "flash_attn_2", "hub", "triton", "sdpa_flash", "sdpa_efficient",
        "xformers", "eager",
    ),
    "hopper, masked": (  # for which torch builds a mask, or leaves cuDNN
        "sdpa_cudnn", "triton", "flash_attn_3", "flash_attn_2", "hub", "sdpa", "sdpa_efficient", "xformers", "eager",
    ),
    "amd": (
        "aiter", "flash_attn_2", "hub", "sdpa_flash", "triton", "sdpa", "sdpa_efficient", "xformers", "eager",
    ),
    "wide": ("sdpa", "triton", "sdpa_efficient", "eager"),  # float32 and float64 on a GPU
}  # fmt: skip


def order(spec: Spec, device: Device) -> Sequence[str]:
    """Names of implementations, the preferred one first; the last one takes every spec on every device.

    Those that were measured on this machine come first.
    """
    known = {name for names in ORDERS.values() for name in names}
    measured = (name for name in attention_stored.preferred(spec, device) if name in known)
    return tuple(dict.fromkeys((*measured, *_listed(spec, device))))


def _listed(spec: Spec, device: Device) -> Sequence[str]:
    if device.kind != "cuda":
        return ORDERS["cpu"]
    if spec.dtype not in HALVES:
        return ORDERS["wide"]
    hopper = device.facts is not None and device.facts.matrix == "wgmma"
    if not hopper or spec.sizes["L"] < MANY or spec.options["bias"] is not None:
        return ORDERS[device.vendor]
    return ORDERS["hopper, masked" if needs_mask(spec) else "hopper"]
