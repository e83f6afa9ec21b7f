"""flash_attention by torch's scaled_dot_product_attention: by the back end that torch chooses, or by a given one.

torch aligns its causal mask with the first key, and its masks are tensors. So a mask is built where there are ranges or
a window, and on a CPU where there are not as many queries as keys; keys that no query sees are replaced by zeros. A
long part of a prompt runs by cuDNN in two calls, over the keys before it and over its own. Limits of the back ends are
those of torch 2.11 to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from accelpatch.device import Device
from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.attention_shape import needs_mask
from accelpatch.kernels.ops.attention.mask import (
    by_token,
    combined,
    emptied,
    rows_contiguous,
    shown,
    visible,
    without_hidden,
)
from accelpatch.kernels.spec import Implementation, Spec

LARGEST_MASK = 2 << 30  # bytes
FLASH_HEAD, CUDNN_HEAD = 256, 128
FIRST_CUDNN = 91501  # earlier ones fail for lengths that are no multiple of 128 (pytorch/pytorch issue 169849)


def is_part(spec: Spec) -> bool:
    """Whether the queries of a call are the last tokens, more than one, of a causal prompt."""
    masked = spec.options["ranges"] or spec.options["bias"] is not None or spec.options["window"]
    earlier = spec.sizes["S"] - spec.sizes["L"]  # cuDNN takes more than one key
    return spec.options["causal"] and not masked and spec.sizes["L"] > 1 and earlier > 1


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_sdpa` cannot run a spec; None where it can."""
    options, sizes = spec.options, spec.sizes
    if options["softcap"] or options["sinks"]:
        return f"torch's attention has no {'softcap' if options['softcap'] else 'sinks'}"
    if options["bias"] not in (None, torch.bool, spec.dtype):
        return f"torch's attention takes a bias in q's dtype, {spec.dtype}, not in {options['bias']}"
    mask_bytes = sizes["B"] * options["bias_heads"] * sizes["L"] * sizes["S"] * spec.dtype.itemsize
    last = device.kind == "cuda" and not (options["ranges"] or options["bias"] or options["window"])
    if needs_mask(spec) and not last and mask_bytes > LARGEST_MASK:
        return (
            f"torch's attention needs a mask of {mask_bytes / (1 << 30):.1f} GiB here, more than {LARGEST_MASK >> 30}"
        )
    return None


def _fused_why_not(spec: Spec, device: Device, name: str, oldest: int) -> str | None:
    """Limits that all of torch's fused kernels have. oldest: NVIDIA's arch."""
    if reason := why_not(spec, device):
        return reason
    if device.kind != "cuda":
        return f"torch's {name} attention runs on GPUs"
    if not spec.sizes["L"] or not spec.sizes["B"]:
        return "there are no queries"
    if device.vendor == "amd":
        known = device.facts is not None and device.facts.matrix == "mfma"
        return None if known else f"AOTriton, which is torch's {name} attention on AMD, is not for {device.arch}"
    old = device.facts is None or device.facts.number < oldest
    return f"torch's {name} attention starts at sm_{oldest}, not {device.arch}" if old else None


def flash_why_not(spec: Spec, device: Device) -> str | None:
    """Why torch's flash back end cannot run a spec; None where it can."""
    if reason := _fused_why_not(spec, device, "flash", 80):
        return reason
    if spec.dtype not in HALVES or spec.sizes["D"] > FLASH_HEAD:
        return f"torch's flash attention takes 16 bits and heads of up to {FLASH_HEAD}"
    return "torch's flash attention takes no mask" if needs_mask(spec) else None


def cudnn_why_not(spec: Spec, device: Device) -> str | None:
    """Why torch's cuDNN back end cannot run a spec; None where it can."""
    if device.vendor == "amd":
        return "cuDNN runs on NVIDIA's GPUs"
    if reason := _fused_why_not(spec, device, "cuDNN", 80):
        return reason
    if spec.dtype not in HALVES or spec.sizes["D"] > CUDNN_HEAD or spec.sizes["D"] % 8:
        return f"cuDNN's attention takes 16 bits and heads of up to {CUDNN_HEAD}, in steps of 8"
    if not is_part(spec) and (needs_mask(spec) or spec.sizes["S"] == 1):
        return "cuDNN's attention is used without a mask, and for more than one key"
    # A plan for another machine has no library.
    version = torch.backends.cudnn.version() if device.index is not None else FIRST_CUDNN
    return None if version and version >= FIRST_CUDNN else f"cuDNN {version} is older than {FIRST_CUDNN}"


def efficient_why_not(spec: Spec, device: Device) -> str | None:
    """Why torch's memory-efficient back end cannot run a spec; None where it can."""
    if reason := _fused_why_not(spec, device, "memory-efficient", 75):
        return reason
    step = 8 if spec.dtype in HALVES else 4
    if spec.dtype not in (*HALVES, torch.float32) or spec.sizes["D"] % step:
        return "torch's memory-efficient attention takes 16 or 32 bits, and heads of a multiple of 16 bytes"
    if spec.dtype == torch.bfloat16 and device.vendor == "nvidia" and device.facts and device.facts.number < 80:
        return f"torch's memory-efficient attention has no bfloat16 on {device.arch}"
    large = device.vendor == "amd" and spec.sizes["D"] > FLASH_HEAD
    return f"AOTriton takes heads of up to {FLASH_HEAD}" if large else None


def by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
    *, backend: SDPBackend | None = None,
) -> Tensor:  # fmt: skip
    """The implementation `sdpa`; with a backend (of CUDA), that one or an error."""
    q, k, v = rows_contiguous(q, k, v)
    length = q.shape[2]
    if ranges is None and causal:
        k, v, bias = without_hidden(length, k, v, bias, window)
    keys = k.shape[2]
    alone = ranges is None and bias is None
    triangle = alone and causal and length == keys > 1 and not 0 < window < keys
    every = alone and (not causal or length == 1)  # all keys are seen
    # the last queries of more keys: torch's own causal bias, which builds no mask on a GPU
    last = alone and causal and 1 < length < keys and not window and q.is_cuda and backend is None
    seen = None if every or triangle or last else visible(length, keys, ranges, causal and length > 1, window, q)
    mask: Any = causal_lower_right(length, keys) if last else combined(seen, bias, q.dtype)
    group, rows = q.shape[1] // k.shape[1], None
    if mask is not None and not last:
        rows = shown(mask)
        k, v = emptied(k, v, rows)
    if group > 1 and (mask is not None or backend is SDPBackend.EFFICIENT_ATTENTION):
        # torch's fused kernels take a mask or grouped heads, not both
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    attend = functools.partial(
        functional.scaled_dot_product_attention, q, k, v, mask, is_causal=triangle, scale=scaling, enable_gqa=group > 1
    )
    if backend is None:
        y = attend()
    else:
        with sdpa_kernel(backend):
            y = attend()
    if rows is not None:
        y = y.masked_fill(~rows.any(-1, keepdim=True), 0)  # some back ends give NaN for a query that sees no key
    return by_token(y)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """The implementation `sdpa_cudnn`."""
    causal, scaling, earlier = rest[3], rest[6], k.shape[2] - q.shape[2]
    if not causal or q.shape[2] == 1 or earlier <= 0:
        return by_sdpa(q, k, v, *rest, backend=SDPBackend.CUDNN_ATTENTION)
    q, k, v = rows_contiguous(q, k, v)
    attend = functools.partial(torch.ops.aten._scaled_dot_product_cudnn_attention, q, scale=scaling)
    y, sums = attend(k[:, :, :earlier], v[:, :, :earlier], None, True)[:2]  # sums: the logsumexp of each query's scores
    own, own_sums = attend(k[:, :, earlier:], v[:, :, earlier:], None, True, is_causal=True)[:2]
    part = torch.sigmoid(own_sums.float() - sums.float()).view(*y.shape[:3], 1)
    return by_token(y.lerp_(own, part.to(y.dtype)))


def _backend(backend: SDPBackend) -> Callable[..., Tensor]:
    return functools.partial(by_sdpa, backend=backend)


IMPLEMENTATIONS = {
    "sdpa_cudnn": Implementation(by_cudnn, cudnn_why_not),
    "sdpa_flash": Implementation(_backend(SDPBackend.FLASH_ATTENTION), flash_why_not),
    "sdpa_efficient": Implementation(_backend(SDPBackend.EFFICIENT_ATTENTION), efficient_why_not),
    "sdpa": Implementation(by_sdpa, why_not),
}
