"""flash_attention of a few queries on a CPU, by the attention of the native decode step (cpu/attention.h).

Each query goes over its keys in runs of 64, which threads share: torch's attention gives each head to one thread.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import Attention, check, native, pointer, threads
from accelpatch.kernels.spec import Implementation, Spec

FEW = 8  # queries
MOST_GROUPED = 64  # query heads of a key head


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_cpu` cannot run a spec; None where it can."""
    sizes, options = spec.sizes, spec.options
    if device.kind != "cpu":
        return "the native kernel runs on a CPU"
    if spec.dtype != torch.float32:
        return f"the native kernel takes float32, not {spec.dtype}"
    if options["bias"]:
        return "the native kernel takes no bias"
    if not 0 < sizes["L"] <= FEW or not sizes["B"]:
        return f"the native kernel takes 1 to {FEW} queries"
    if sizes["H"] > MOST_GROUPED * sizes["Hkv"]:
        return f"the native kernel takes up to {MOST_GROUPED} query heads of a key head"
    return native_library.why_not(device)


def by_cpu(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """The implementation `cpu`."""
    (batch, heads, length, size), (_, kv_heads, keys, _) = q.shape, k.shape
    rows = q.transpose(1, 2).contiguous()
    k, v = _slots(k), _slots(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    y = torch.empty_like(rows)
    if ranges is None:
        last = torch.arange(keys - length, keys) if causal else torch.full((length,), keys - 1)
        first = torch.zeros_like(last)
        both = torch.stack((first, last + 1), -1).expand(batch, length, 2)
    else:
        both = ranges.to(torch.int64)
    float_sinks = None if sinks is None else sinks.float().contiguous()
    empty = both[..., 1] <= both[..., 0]
    starts = both[..., 0].clamp(max=keys - 1).contiguous()
    slots = torch.where(empty, starts, both[..., 1] - 1).contiguous()
    for row in range(batch):  # the queries of a row read the same keys
        call = Attention(
            pointer(rows[row]), pointer(k[row]), pointer(v[row]), pointer(y[row]), pointer(slots[row]),
            pointer(starts[row]), length, heads, kv_heads, size, 0, k.stride(1), window, scaling, softcap,
            pointer(float_sinks),
        )  # fmt: skip
        check(native().ap_attention_run(byref(call), threads()), f"q of shape {list(q.shape)}")
    return y.masked_fill_(empty[..., None, None], 0) if ranges is not None else y


def _slots(states: Tensor) -> Tensor:
    """Keys or values whose slots are contiguous; copied only where needed."""
    fits = states.stride(3) == 1 and states.stride(2) == states.shape[3]
    return states if fits else states.contiguous()


IMPLEMENTATIONS = {"cpu": Implementation(by_cpu, why_not)}
