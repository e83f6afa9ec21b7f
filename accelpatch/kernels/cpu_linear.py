"""The implementation "cpu" of the products with a quantised weight: native code over a packed weight (cpu_pack).

`pack` is a further argument of the operations, made from the canonical tensors and held by the module: uint8 [bytes].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels import cpu_native, cpu_pack
from accelpatch.kernels.cpu_pack import Pack
from accelpatch.kernels.dispatch import Implementation, Spec, require


def why_not(spec: Spec, device: Device) -> str | None:
    """The native product runs float32, bfloat16 and float16 over packed weights, on a CPU with a library for it."""
    n, k, group = spec.sizes["N"], spec.sizes["K"], spec.group_size
    assert group is not None
    if reason := cpu_native.why_not(device):
        return reason
    if spec.dtype not in cpu_native.DTYPES:
        return f"it computes in float32, not in {spec.dtype}"
    if reason := cpu_pack.why_not(n, k, group, spec.offset):
        return reason
    return None if spec.options.get("packed") else "the weight is not packed for it"


def _pack(kind: int, q: Tensor, scale: Tensor, offset: str, bias: Tensor | None, pack: Tensor | None) -> Pack:
    assert pack is not None
    n, groups = scale.shape
    k = q.shape[1] * (2 if kind == cpu_native.INT4 else 1)
    bytes_of = {half: cpu_pack.pack_bytes(kind, n, k, k // groups, half, offset == "minimum") for half in (False, True)}
    fits = pack.dtype == torch.uint8 and pack.numel() in bytes_of.values()
    require(fits, "cpu", f"a pack of {bytes_of[False]} bytes belongs to this weight, not {pack.numel()}: pack it again")
    half = pack.numel() == bytes_of[True]
    return Pack(kind, n, k, k // groups, half, offset, pack, None if bias is None else bias.float().contiguous())


def _int8(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None, pack: Tensor | None = None) -> Tensor:
    return cpu_pack.linear(x, _pack(cpu_native.INT8, q, scale, "none", bias, pack))


def _int4(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    pack: Tensor | None = None,
) -> Tensor:
    kind = "none" if offset is None else "minimum"
    return cpu_pack.linear(x, _pack(cpu_native.INT4, q, scale, kind, bias, pack))


def _prepare_int8(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    if unpacked(q.shape[1], scale, None):
        return x, q, scale, bias
    return x, q, scale, bias, cpu_pack.pack_int8(q, scale).data


def _prepare_int4(
    x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Any, ...]:
    if unpacked(2 * q.shape[1], scale, offset):
        return x, q, scale, offset, bias
    return x, q, scale, offset, bias, cpu_pack.pack_int4(q, scale, offset).data


def unpacked(k: int, scale: Tensor, offset: Tensor | None) -> str | None:
    """Why a weight with this scale has no pack on its device, or None: what a module asks before it packs."""
    kind = "none" if offset is None else "minimum" if offset.is_floating_point() else "zero_point"
    return cpu_native.why_not(probe(scale.device)) or cpu_pack.why_not(scale.shape[0], k, k // scale.shape[1], kind)


INT8 = Implementation(_int8, why_not, _prepare_int8)
INT4 = Implementation(_int4, why_not, _prepare_int4)
