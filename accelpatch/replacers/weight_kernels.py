"""Which kernel runs on a quantised weight at a site, what it needs, and the bytes that it reads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.codebooks import scale_dtype as dtype_of
from accelpatch.kernels.compiling import libraries as built
from accelpatch.kernels.ops.linear import int8_linear, packed_linear, tiled_int3_linear, tiled_int4_linear
from accelpatch.kernels.spec import Spec
from accelpatch.patching.site import Site

INT8_SCALE = 4  # bytes per scale: float32
NATIVE = "cpu"  # the implementation over packs, the native CPU layout
STORED = "cpu_stored"  # the implementation over weights as a checkpoint stores them
CPU_LIBRARY = "cpu"
HIP = "hip"
ON_GPU = {
    "int4_linear": "tiled_int4_linear",
    "int3_linear": "tiled_int3_linear",
}  # operation -> the one over the GPU kernels' layout
BITS = {"int8_linear": 8, "int4_linear": 4, "int3_linear": 3}  # of a value
LIBRARIES = {
    "int8_linear": int8_linear.libraries,
    "tiled_int4_linear": tiled_int4_linear.libraries,
    "tiled_int3_linear": tiled_int3_linear.libraries,
}
INT4_SCALE = 2  # bytes per scale: float16


def weight_of(module: nn.Module) -> Tensor:
    """The float weight [N, K]; rows are output channels, or tokens of an embedding."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.detach().t() if type(module).__name__ == "Conv1D" else weight.detach()


def kernel_for(op: str, site: Site, device: Device, group_size: int, offset: str) -> tuple[str, str, Spec]:
    """The implementation that would run for one token, why it is not a native one ("" where it is), and the call.

    Raises KernelError with every implementation's reason where none can run.
    """
    assert site.n is not None
    assert site.k is not None
    dtype = getattr(torch, site.dtype)
    packed = "packed_embedding" if op == "int8_embedding" else "packed_linear"
    spec = packed_linear.of_shape(site.n, site.k, dtype, group_size, offset, op=packed)
    reason = dispatch.why_not(packed, NATIVE, spec, device)
    if reason is None:
        return NATIVE, "", spec
    scale = scale_dtype(op, offset)
    spec = Spec(op, {"M": 1, "N": site.n, "K": site.k}, dtype, scale, group_size, offset)
    chosen = dispatch.choose(op, spec, device)
    if device.kind == "cpu":
        return chosen, f"no native CPU kernels: {reason}", spec
    own = replace(spec, op=ON_GPU.get(op, op))
    if HIP not in dispatch.kernel(own.op).implementations:
        return chosen, "", spec
    reason = dispatch.why_not(own.op, HIP, own, device)
    if reason is None:
        return HIP, "", own
    return chosen, f"{op} by {chosen}, not by the HIP kernels: {reason}", spec


def scale_dtype(op: str, kind: str) -> torch.dtype:
    """The dtype that a weight's scales usually have."""
    if kind in CODEBOOKS:
        return dtype_of(kind)
    return torch.float16 if "int4" in op or "int3" in op else torch.float32


def slower(kernel: str, device: Device) -> str:
    """Why a quantised weight makes a module slower: on a CPU without the native library torch dequantises it at every
    call. "" where a kernel reads it as it is."""
    if device.kind != "cpu" or kernel == NATIVE or (reason := built.why_not(CPU_LIBRARY, device)) is None:
        return ""
    return f"without native CPU kernels it would be slower than the original ({reason.partition(': ')[0]})"


def libraries(kernel: str, op: str, site: Site, device: Device, group_size: int, offset: str) -> tuple[str, ...]:
    """The device libraries that linear layers of a site, or tied to it, launch; none where other kernels run."""
    if device.kind == "cpu":
        return (CPU_LIBRARY,) if kernel == NATIVE else ()
    if all(isinstance(member.original, nn.Embedding) for member in (site, *site.tied)):
        return ()
    assert site.n is not None
    assert site.k is not None
    scale = scale_dtype(op, offset)
    spec = Spec(op, {"M": 1, "N": site.n, "K": site.k}, getattr(torch, site.dtype), scale, group_size, offset)
    return () if dispatch.why_not(op, HIP, spec, device) else LIBRARIES[op](spec, device)


def token_bytes(site: Site, resident: int) -> int:
    """Bytes read to decode one token: the whole weight of a linear layer, one row of an embedding, both where tied."""
    assert site.n is not None
    row = resident // site.n
    if isinstance(site.original, nn.Embedding):
        return row
    return resident + (row if any(isinstance(tied.original, nn.Embedding) for tied in site.tied) else 0)


def stored_bytes(scale: torch.dtype, kernel: str) -> int:
    """Bytes of a scale as a kernel reads it: tiles and packs have no scales of 8 bits."""
    return max(scale.itemsize, 2 if kernel in (NATIVE, HIP) else 1)


def dividing(wanted: int | list[int | None] | None, k: int, whole: int | None = None) -> list[int]:
    """Those of the group sizes that divide K, in order; null becomes K, one group per row. whole: of a weight of which
    tensor parallel left K columns here, how many it has; sizes must divide that too, so that all ranks round alike."""
    sizes = wanted if isinstance(wanted, list) else [wanted]
    exact = [k if size is None else size for size in sizes if size is None or not size or not (whole or k) % size]
    return [size for size in exact if isinstance(size, int) and size > 0 and k % size == 0]


def bias_bytes(site: Site) -> int:
    """Bytes of the parameters that stay float: the bias, if the module owns one."""
    weight = weight_of(site.original)
    return max(0, site.bytes - weight.numel() * weight.element_size())
