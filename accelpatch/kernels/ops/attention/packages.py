"""flash_attention by kernels of other packages, where these are installed; none is required or downloaded.

    flash_attn_3   flash_attn_interface.flash_attn_func           Hopper
    flash_attn_2   flash_attn.flash_attn_func                     NVIDIA; AMD by Composable Kernel or Triton
    hub            the same function of a package that the `kernels` library has put on the disk
    aiter          aiter.flash_attn_func                          AMD
    xformers       xformers.ops.memory_efficient_attention

They take q, k, v[B, L, H, D] in 16 bits, and align a causal mask with the last key, as flash_attention does. Their
forms for sequences of different lengths are not used: they need the sequences' starts on the host.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels.ops.attention.mask import rows_contiguous
from accelpatch.kernels.spec import Implementation, Spec

LARGEST_HEAD, STEP = 256, 8  # size of a head
HUB = ("flash-attn3", "flash-attn2", "flash-attn")  # repositories of kernels-community


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _why_not(spec: Spec, device: Device, package: str, name: str) -> str | None:
    """Limits that the kernels of all packages have; None within them."""
    options, size = spec.options, spec.sizes["D"]
    if device.kind != "cuda":
        return f"{name} runs on GPUs"
    if spec.dtype.itemsize != 2:
        return f"{name} takes bfloat16 and float16"
    if size > LARGEST_HEAD or size % STEP:
        return f"{name} takes heads of up to {LARGEST_HEAD}, in steps of {STEP}"
    for what in ("ranges", "bias", "sinks"):
        if options[what]:
            return f"{name} is used without {what}"
    if not all(spec.sizes[one] for one in ("B", "L")):
        return "there are no queries"
    return None if installed(package) else f"{name} is not installed: there is no module {package}"


def flash_attn_3_why_not(spec: Spec, device: Device) -> str | None:
    """Why `flash_attn_3` cannot run a spec; None where it can."""
    if device.kind == "cuda" and (device.facts is None or device.facts.matrix != "wgmma"):
        return f"FlashAttention 3 is for Hopper, not {device.arch}"
    return _why_not(spec, device, "flash_attn_interface", "FlashAttention 3")


def flash_attn_2_why_not(spec: Spec, device: Device) -> str | None:
    """Why `flash_attn_2` cannot run a spec; None where it can."""
    old = device.vendor == "nvidia" and (device.facts is None or device.facts.number < 80)
    return f"FlashAttention 2 starts at sm_80, not {device.arch}" if old else _why_not(
        spec, device, "flash_attn", "FlashAttention 2"
    )  # fmt: skip


def aiter_why_not(spec: Spec, device: Device) -> str | None:
    """Why `aiter` cannot run a spec; None where it can."""
    facts = device.facts
    if device.kind == "cuda" and (facts is None or facts.matrix != "mfma" or facts.fp8 is None):
        return f"AITER is for CDNA 3 and 4, not {device.arch}"
    if spec.options["softcap"]:
        return "AITER is used without a softcap"
    return _why_not(spec, device, "aiter", "AITER")


def xformers_why_not(spec: Spec, device: Device) -> str | None:
    """Why `xformers` cannot run a spec; None where it can."""
    if spec.options["softcap"] or spec.options["window"]:
        return "xformers is used without softcap and window"
    return _why_not(spec, device, "xformers", "xformers")


def hub_why_not(spec: Spec, device: Device) -> str | None:
    """Why `hub` cannot run a spec; None where it can."""
    if reason := _why_not(spec, device, "kernels", "a kernel of the hub"):
        return reason
    return None if on_disk() is not None else f"none of {', '.join(HUB)} of kernels-community lies in the hub's cache"


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


@functools.cache
def on_disk() -> tuple[Path, str] | None:
    """(snapshot, package) of a flash-attn kernel in the hub's cache, or None. Nothing is fetched."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    for name in HUB:
        for snapshot in sorted((cache / f"models--kernels-community--{name}" / "snapshots").glob("*/build")):
            return snapshot.parent, name.replace("-", "_")
    return None


@functools.cache
def _of_hub() -> ModuleType:
    found = on_disk()
    assert found is not None
    made: ModuleType = _module("kernels").get_local_kernel(*found)
    return made


def _attend(
    function: Callable[[], Callable[..., Any]], softcap_name: str | None, q: Tensor, k: Tensor, v: Tensor,
    ranges: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None, causal: bool = True,
    window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """By a function with flash-attn's signature. softcap_name: its argument for the softcap, if it has one."""
    more: dict[str, Any] = {softcap_name: softcap} if softcap_name is not None and softcap else {}
    if window:
        more["window_size"] = (window - 1, 0)
    q, k, v = (one.transpose(1, 2) for one in rows_contiguous(q, k, v))
    y = function()(q, k, v, softmax_scale=scaling, causal=causal, **more)
    made: Tensor = y[0] if isinstance(y, tuple) else y  # some releases give the softmax's sums too
    return made.contiguous()


def _of(module: str) -> Callable[[], Callable[..., Any]]:
    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = _module(module).flash_attn_func
        return found

    return function


def by_xformers(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """The implementation `xformers`: grouped heads as a dimension of their own, [B, L, Hkv, Hq / Hkv, D]."""
    fmha = _module("xformers.ops")
    group = q.shape[1] // k.shape[1]
    q = q.transpose(1, 2).unflatten(2, (k.shape[1], group))
    k, v = (one.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, group, -1) for one in (k, v))
    mask = None
    if causal and q.shape[1] > 1:
        triangle = q.shape[1] == k.shape[1]
        mask = fmha.LowerTriangularMask() if triangle else fmha.fmha.attn_bias.LowerTriangularFromBottomRightMask()
    y: Tensor = fmha.memory_efficient_attention(q, k, v, attn_bias=mask, scale=scaling)
    return y.flatten(2, 3).contiguous()


def _by(function: Callable[[], Callable[..., Any]], softcap: str | None) -> Callable[..., Tensor]:
    return functools.partial(_attend, function, softcap)


IMPLEMENTATIONS = {
    "flash_attn_3": Implementation(_by(_of("flash_attn_interface"), "softcap"), flash_attn_3_why_not),
    "flash_attn_2": Implementation(_by(_of("flash_attn"), "softcap"), flash_attn_2_why_not),
    "hub": Implementation(_by(lambda: _of_hub().flash_attn_func, "softcap"), hub_why_not),
    "aiter": Implementation(_by(_of("aiter"), None), aiter_why_not),
    "xformers": Implementation(by_xformers, xformers_why_not),
}
