"""The order of preference of flash_attention's implementations, by device and dtype.

What `accelpatch tune attention` measured on this machine comes first; the lists below are for all others. Those of AMD
follow ROCm's documentation (AITER, flash-attn, and AOTriton, which torch runs as its flash back end) and are not
measured. Every order ends with `eager`, which takes everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from accelpatch.device import Device
from accelpatch.kernels.ops import attention_stored
from accelpatch.kernels.spec import Spec

HALVES = (torch.bfloat16, torch.float16)

#: device, matrix unit, vendor or kind of dtype -> implementations, the preferred one first
ORDERS: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "sdpa", "eager"),
    "wgmma": ("flash_attn_3", "sdpa_cudnn", "hub", "flash_attn_2", "sdpa_flash", "triton", "xformers", "sdpa", "eager"),
    "nvidia": ("flash_attn_2", "hub", "sdpa_flash", "triton", "sdpa_cudnn", "xformers", "sdpa", "eager"),
    "amd": ("aiter", "flash_attn_2", "hub", "sdpa_flash", "triton", "xformers", "sdpa", "eager"),
    "wide": ("sdpa_efficient", "sdpa", "triton", "eager"),  # float32 and float64 on a GPU
}


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
    unit = None if device.facts is None else device.facts.matrix
    return ORDERS.get(unit or "", ORDERS[device.vendor])
