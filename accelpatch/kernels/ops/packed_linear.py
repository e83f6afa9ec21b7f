"""Weight-only linear layer and embedding over a weight in the native CPU kernels' layout (cpu_pack.py).

    packed_linear      y[..., N] = x[..., K] @ w[N, K]^T + bias[N]
    packed_embedding   rows[..., K] = w[ids[...]]

The pack is the only copy of the weight that a module holds. It has the same values as in int8_linear and int4_linear:
the reference unpacks it and runs theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import linear as cpu_linear
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import DENSE, INT8
from accelpatch.kernels.dispatch import require
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops import gemv, int4_linear, int8_embedding, int8_linear, linear
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

#: code path -> rows of x from which dequantising is faster (VNNI's integer GEMM stays faster for longer)
PANELS = {"avx512": 64, "avx2": 16, "portable": 16}
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def dense(dtype: torch.dtype, *packed: Any) -> tuple[Tensor, Tensor | None]:
    """The pack's weight as floats in `dtype`, and the bias."""
    *weight, bias = packed
    pack = Pack(*weight)
    if pack.kind == DENSE:
        return gemv.dense(dtype, pack.unpack(), bias)
    q, scale, offset = pack.unpack()
    if pack.kind == INT8:
        return int8_linear.dense(dtype, q, scale, bias)
    return int4_linear.dense(dtype, q, scale, offset, bias)


def blocks(*packed: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The weight and the bias in float64, in blocks of rows."""
    *weight, bias = packed
    pack = Pack(*weight)
    if pack.kind == DENSE:
        return gemv.blocks(pack.unpack(), bias)
    q, scale, offset = pack.unpack()
    if pack.kind == INT8:
        return int8_linear.blocks(q, scale, bias)
    return int4_linear.blocks(q, scale, offset, bias)


def reference(x: Tensor, *packed: Any) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *packed))


def embedding_reference(ids: Tensor, dtype: torch.dtype, *packed: Any) -> Tensor:
    """Unpack the canonical tensors, then the reference of int8_embedding."""
    q, scale, _ = Pack(*packed).unpack()
    return int8_embedding.reference(ids, q, scale, dtype)


def spec(x: Tensor, *packed: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where x does not fit the pack."""
    pack, op = Pack.of_arguments(*packed), "packed_linear"
    require(x.dim() >= 1 and x.shape[-1] == pack.k, op, f"x is [..., {pack.k}], not {linear.say(x)}")
    require(
        pack.data.nbytes == pack.due, op, f"the pack has {pack.data.nbytes} bytes, this shape {pack.due}: pack it anew"
    )
    require(x.is_floating_point() and x.device == pack.data.device, op, f"x is float on the CPU, not {linear.say(x)}")
    return of_shape(pack.n, pack.k, x.dtype, pack.group, pack.offset, m=x.numel() // pack.k)


def of_shape(
    n: int, k: int, dtype: torch.dtype, group: int, offset: str, *, m: int = 1, op: str = "packed_linear"
) -> Spec:
    """The Spec of a pack of this size, for planning before there is one."""
    return Spec(op, {"M": m, "N": n, "K": k}, dtype, torch.float32, group, offset)


def embedding_spec(ids: Tensor, dtype: torch.dtype, *packed: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for ids that are not integers."""
    pack, op = Pack(*packed), "packed_embedding"
    require(ids.dtype in (torch.int32, torch.int64), op, f"ids are int32 or int64, not {ids.dtype}")
    return of_shape(pack.n, pack.k, dtype, pack.group, pack.offset, m=ids.numel(), op=op)


def _why_not(spec: Spec, device: Device) -> str | None:
    if spec.dtype not in NARROW:
        return f"it computes in float32 and narrower, not in {spec.dtype}"
    assert spec.group_size is not None
    reason = Pack.why_not(spec.sizes["N"], spec.sizes["K"], spec.group_size, spec.offset)
    return reason or native_library.why_not(device)


def _cpu(x: Tensor, *packed: Any) -> Tensor:
    pack = Pack.of_arguments(*packed)
    many = x.numel() // pack.k >= PANELS.get(native_library.isa(), PANELS["portable"])
    return (cpu_linear.by_panels if many else cpu_linear.linear)(x, pack)


def _torch(x: Tensor, *packed: Any) -> Tensor:
    *weight, bias = packed
    pack = Pack(*weight)
    if pack.kind == DENSE:
        return reference(x, *packed)
    q, scale, offset = pack.unpack()
    if pack.kind == INT8:
        return int8_linear.by_torch(x, q, scale, bias)
    return int4_linear.by_torch(x, q, scale, offset, bias)


def _torch_embedding(ids: Tensor, dtype: torch.dtype, *packed: Any) -> Tensor:
    q, scale, _ = Pack(*packed).unpack()
    return int8_embedding.by_torch(ids, q, scale, dtype)


def _torch_why_not(spec: Spec, device: Device) -> str | None:
    return None if device.kind == "cpu" else f"a pack is the CPU's layout, and this is {device.name}"


def _cpu_embedding(ids: Tensor, dtype: torch.dtype, *packed: Any) -> Tensor:
    pack = Pack(*packed)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < pack.n:
        raise IndexError(f"an id is out of range: the table has {pack.n} rows")
    return cpu_linear.gather(pack, ids).to(dtype)


@operation("packed_linear")
def packed_linear(
    x: Tensor,
    data: Tensor,
    kind: int,
    n: int,
    k: int,
    group: int,
    half_scales: bool,
    offset: str,
    bias: Tensor | None = None,
) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, contiguous. Between x and bias lie the `arguments` of a Pack.

    Raises KernelError for an x that does not fit, and where the native library is not available.
    """
    args = (x, data, kind, n, k, group, half_scales, offset, bias)
    y: Tensor = dispatch.run("packed_linear", spec, x.device, args)
    return y


@packed_linear.register_fake
def _fake(
    x: Tensor,
    data: Tensor,
    kind: int,
    n: int,
    k: int,
    group: int,
    half_scales: bool,
    offset: str,
    bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


@operation("packed_embedding")
def packed_embedding(
    ids: Tensor, dtype: torch.dtype, data: Tensor, kind: int, n: int, k: int, group: int, half_scales: bool, offset: str
) -> Tensor:  # fmt: skip
    """rows[..., K] of the table in `dtype`. After dtype come the `arguments` of an int8 Pack.

    ids[...] int32 or int64 in 0..N-1, else IndexError.
    """
    args = (ids, dtype, data, kind, n, k, group, half_scales, offset)
    y: Tensor = dispatch.run("packed_embedding", embedding_spec, data.device, args)
    return y


@packed_embedding.register_fake
def _fake_embedding(
    ids: Tensor, dtype: torch.dtype, data: Tensor, kind: int, n: int, k: int, group: int, half_scales: bool, offset: str
) -> Tensor:  # fmt: skip
    return data.new_empty((*ids.shape, k), dtype=dtype)


def _packed(make: Any) -> Any:
    """Convert a case of a canonical operation to a case of the packed one."""

    def packed(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        args = make(generator, dtype, device)
        if len(args) == 4:
            x, q, scale, bias = args
            return x, *Pack.pack(q, scale, bits=8).arguments(), bias
        x, q, scale, offset, bias = args
        return x, *Pack.pack(q, scale, offset, bits=4).arguments(), bias

    return packed


def _fits(case: Case) -> bool:
    """Whether the case's group size (the part `g...` of its id) and kind of offset can be packed."""
    group, k = (int(part[1:]) for name in "gk" for part in case.id.split("-") if part[0] == name and part[1:].isdigit())
    return "zero_point" not in case.id and (group == k or group % 32 == 0)


def cases() -> list[Case]:
    """The cases of int8_linear and int4_linear that can be packed, as packs."""
    canonical = [("int8", case) for case in int8_linear.cases()] + [("int4", case) for case in int4_linear.cases()]
    return [Case(f"{kind}-{case.id}", _packed(case.make)) for kind, case in canonical if _fits(case)]


def embedding_cases() -> list[Case]:
    """The cases of int8_embedding whose groups can be packed, as packs."""

    def packed(make: Any) -> Any:
        def made(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            ids, q, scale, wanted = make(generator, dtype, device)
            return ids, wanted, *Pack.pack(q, scale, bits=8).arguments()

        return made

    return [Case(case.id, packed(case.make)) for case in int8_embedding.cases() if _fits(case)]


LINEAR = {
    "cpu": Implementation(_cpu, _why_not),
    "torch": Implementation(_torch, _torch_why_not),
}
EMBEDDING = {
    "cpu": Implementation(_cpu_embedding, _why_not),
    "torch": Implementation(_torch_embedding, _torch_why_not),
}
KERNELS = {
    "packed_linear": Kernel(packed_linear, reference, spec, LINEAR, cases, blocks),
    "packed_embedding": Kernel(packed_embedding, embedding_reference, embedding_spec, EMBEDDING, embedding_cases),
}
