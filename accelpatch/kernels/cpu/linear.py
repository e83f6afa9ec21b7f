"""Bindings of the native linear layers and the row gather over a Pack."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu.native_library import (
    COLUMNS,
    DTYPES,
    INT4,
    INT8,
    PLAIN,
    W8A8,
    check,
    isa,
    native,
    pointer,
    threads,
)
from accelpatch.kernels.layouts.cpu_pack import Pack

#: code path -> rows of x from which `by_panels` is faster than `linear` (VNNI stays faster for longer)
PANELS = {"avx512": 64, "avx2": 16, "portable": 16}
CACHED = 1 << 21  # values of an int8 or int4 weight that a core's cache holds; larger ones come from memory
CACHED_PANELS = 32  # VNNI: rows of x from which panels are faster for a weight that the cache holds. For larger ones
CHUNK = 64  # they never are where `linear` runs in chunks of so many rows of x, which the cache then holds


def product(x: Tensor, pack: Pack) -> Tensor:
    """y[..., N] = x[..., K] @ weight^T + bias by whichever of `linear` and `by_panels` is faster, measured on Zen 4.

    A row's result depends on the number of rows, and on no other row.
    """
    rows, path = x.shape[:-1].numel(), isa()
    if path == "avx512" and pack.kind in (INT8, INT4):
        if pack.n * pack.k > CACHED:
            return linear(x, pack, CHUNK)
        return (by_panels if rows >= CACHED_PANELS else linear)(x, pack)
    many = pack.kind != W8A8 and rows >= PANELS.get(path, PANELS["portable"])
    return (by_panels if many else linear)(x, pack)


def linear(x: Tensor, pack: Pack, chunk: int = 0) -> Tensor:
    """y[..., N] = x[..., K] @ weight^T + bias in x's dtype (float32, bfloat16 or float16). x may have any strides.

    chunk: rows of x that meet the whole weight together; 0: all.
    """
    rows, stride = _rows(x, pack)
    y, struct, count = torch.empty(*x.shape[:-1], pack.n, dtype=x.dtype, device="cpu"), pack.struct(), rows.shape[0]
    if 0 < chunk < count:
        parts = zip(rows.split(chunk), y.view(count, pack.n).split(chunk), strict=True)
    else:
        parts = zip((rows,), (y,), strict=True)
    for given, out in parts:
        status = native().ap_linear_run(
            byref(struct), pointer(given), given.shape[0], stride, pointer(out), pack.n, DTYPES[x.dtype], threads()
        )
        check(status, f"x of shape {list(x.shape)}")
    return y


def by_panels(x: Tensor, pack: Pack) -> Tensor:
    """As `linear` in float32, for many rows: each weight is dequantised once for all of them."""
    rows, stride = _rows(x.float(), pack)
    y, struct = torch.empty(*x.shape[:-1], pack.n, **PLAIN), pack.struct()
    status = native().ap_panels_run(byref(struct), pointer(rows), rows.shape[0], stride, pointer(y), pack.n, threads())
    check(status, f"x of shape {list(x.shape)}")
    return y.to(x.dtype)


def input_gradient(dy: Tensor, pack: Pack) -> Tensor:
    """dx[..., K] = dy[..., N] @ weight in dy's dtype, summed in float32; each weight is dequantised once a call."""
    rows, struct = dy.reshape(-1, pack.n).to(torch.float32).contiguous(), pack.struct()
    made = torch.empty(rows.shape[0], -(-pack.k // COLUMNS) * COLUMNS, **PLAIN)
    given = (pointer(rows), rows.shape[0], pack.n, pointer(made), made.shape[1], threads())
    check(native().ap_gradient_run(byref(struct), *given), f"a gradient of shape {list(dy.shape)}")
    dx = made[:, : pack.k]
    if pack.order is not None:
        dx = torch.empty_like(dx).index_copy_(1, pack.order.long(), dx)
    return dx.to(dy.dtype).reshape(*dy.shape[:-1], pack.k)


def _rows(x: Tensor, pack: Pack) -> tuple[Tensor, int]:
    """x as rows that are each contiguous, and the stride between rows."""
    if x.dtype not in DTYPES or x.shape[-1] != pack.k or x.device.type != "cpu":
        raise KernelError(f"the CPU kernel takes float x[..., {pack.k}] on the CPU, not {x.dtype} {list(x.shape)}")
    rows = x.reshape(-1, pack.k)
    if rows.stride(1) != 1 or (rows.shape[0] > 1 and rows.stride(0) < pack.k):
        rows = rows.contiguous()
    return rows, max(rows.stride(0), pack.k)


def gather(pack: Pack, ids: Tensor) -> Tensor:
    """Rows ids[...] of the weight as float32 [..., K]. Raises KernelError for an id that is out of range."""
    rows, flat, struct = torch.empty(*ids.shape, pack.k, **PLAIN), ids.to(torch.int64).contiguous(), pack.struct()
    check(native().ap_gather(byref(struct), pointer(flat), flat.numel(), pointer(rows)), f"rows of a table of {pack.n}")
    return rows
