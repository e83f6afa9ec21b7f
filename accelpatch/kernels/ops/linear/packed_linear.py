"""Weight-only linear layer and embedding over a weight in the native CPU kernels' layout (cpu_pack.py), of any kind.

    packed_linear      y[..., N] = x[..., K] @ w[N, K]^T + bias[N]
    packed_embedding   rows[..., K] = w[ids[...]]

The pack is the only copy of the weight that a module holds. It has the same values as in int8_linear, int4_linear and
int3_linear, or as in block_linear: the reference unpacks it and decodes as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require, say
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.cpu import linear as cpu_linear
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks
from accelpatch.kernels.layouts.row_major import Int3Rows, Int4Rows, Int8Rows, Plain, RowMajor
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import (
    block_linear,
    common,
    float_linear,
    gradient,
    int3_linear,
    int4_linear,
    int8_linear,
)
from accelpatch.kernels.ops.linear.packed_cases import cases, embedding_cases
from accelpatch.kernels.spec import Blocks, Implementation, Kernel, Spec

#: canonical layout -> its weight and bias as floats, of (dtype, *arguments, bias)
DECODERS: Mapping[type, Callable[..., tuple[Tensor, Tensor | None]]] = {
    Plain: float_linear.dense, Int8Rows: int8_linear.dense, Int4Rows: int4_linear.dense, Int3Rows: int3_linear.dense,
    GgufBlocks: block_linear.dense,
}  # fmt: skip
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def dense(dtype: torch.dtype, *packed: Any) -> tuple[Tensor, Tensor | None]:
    """The pack's weight as floats in `dtype`, its columns as they multiply x, and the bias."""
    *weight, bias = packed
    return _dense(Pack(*weight).canonical(), dtype, bias)


def _dense(rows: RowMajor, dtype: torch.dtype, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return common.dense_of(rows, DECODERS[type(rows)], dtype, bias)


def blocks(*packed: Any) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    *weight, bias = packed
    rows = Pack(*weight).canonical()
    return common.blocks_of(rows, DECODERS[type(rows)], bias)


def reference(x: Tensor, *packed: Any) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *packed))


def embedding_reference(ids: Tensor, dtype: torch.dtype, *packed: Any) -> Tensor:
    """Dequantise the rows that the ids select, then torch's own embedding over this smaller table."""
    used, places = torch.unique(ids, return_inverse=True)
    return functional.embedding(places, _dense(Pack(*packed).canonical().at(used), dtype)[0])


def spec(x: Tensor, *packed: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where x does not fit the pack."""
    pack, op = Pack.of_arguments(*packed), "packed_linear"
    require(x.dim() >= 1 and x.shape[-1] == pack.k, op, f"x is [..., {pack.k}], not {say(x)}")
    require(
        pack.data.nbytes == pack.due, op, f"the pack has {pack.data.nbytes} bytes, this shape {pack.due}: pack it anew"
    )
    require(x.is_floating_point() and x.device == pack.data.device, op, f"x is float on the CPU, not {say(x)}")
    return of_shape(pack.n, pack.k, x.dtype, pack.group, pack.offset, m=x.numel() // pack.k)


def of_shape(
    n: int, k: int, dtype: torch.dtype, group: int, offset: str, *, m: int = 1, op: str = "packed_linear"
) -> Spec:
    """The Spec of a pack of this size, for planning before there is one. offset: of its kinds, or a codebook's name."""
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
    codes = spec.offset if spec.offset in CODEBOOKS else ""
    offset = "none" if codes else spec.offset
    reason = Pack.why_not(spec.sizes["N"], spec.sizes["K"], spec.group_size, offset, codes=codes)
    return reason or native_library.why_not(device)


def _cpu(x: Tensor, *packed: Any) -> Tensor:
    return cpu_linear.product(x, Pack.of_arguments(*packed))


def _torch(x: Tensor, *packed: Any) -> Tensor:
    *weight, bias = packed
    unpacked = Pack(*weight).canonical()

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return _dense(unpacked.at(slice(start, stop)), dtype)[0]

    return common.by_row_blocks(x, unpacked.n, unpacked.k, rows, bias)


def _torch_embedding(ids: Tensor, dtype: torch.dtype, *packed: Any) -> Tensor:
    unpacked, flat = Pack(*packed).canonical(), ids.reshape(-1)
    # index_select, as nn.Embedding does: an id out of range, a negative one too, raises IndexError
    places = torch.arange(unpacked.n).index_select(0, flat)
    return _dense(unpacked.at(places), dtype)[0].view(*ids.shape, unpacked.k)


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
    codes: str,
    order: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, contiguous. Between x and bias lie the `arguments` of a Pack.

    Raises KernelError for an x that does not fit, and where the native library is not available.
    """
    args = (x, data, kind, n, k, group, half_scales, offset, codes, order, bias)
    y: Tensor = dispatch.run("packed_linear", spec, x.device, args)
    return y


packed_linear.register_fake(lambda x, data, kind, n, *rest: x.new_empty((*x.shape[:-1], n)))


def _rows(pack: Pack) -> gradient.Rows:
    """The rows of the weight, of the unpacked codes."""
    weight = pack.canonical()
    return gradient.of_rows(weight, DECODERS[type(weight)])


def _native_gradient(dy: Tensor, pack: Pack) -> Tensor | None:
    """By the native library, which computes in float32."""
    return cpu_linear.input_gradient(dy, pack) if dy.dtype in NARROW else None


gradient.differentiate(packed_linear, Pack, _rows, native=_native_gradient)


@operation("packed_embedding")
def packed_embedding(
    ids: Tensor, dtype: torch.dtype, data: Tensor, kind: int, n: int, k: int, group: int, half_scales: bool,
    offset: str, codes: str, order: Tensor | None,
) -> Tensor:  # fmt: skip
    """rows[..., K] of the table in `dtype`. After dtype come the `arguments` of a Pack.

    ids[...] int32 or int64 in 0..N-1, else IndexError.
    """
    args = (ids, dtype, data, kind, n, k, group, half_scales, offset, codes, order)
    y: Tensor = dispatch.run("packed_embedding", embedding_spec, data.device, args)
    return y


packed_embedding.register_fake(lambda ids, dtype, data, kind, n, k, *rest: data.new_empty((*ids.shape, k), dtype=dtype))


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
