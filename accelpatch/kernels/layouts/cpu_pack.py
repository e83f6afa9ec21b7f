"""Weights in the layout that the native CPU kernels stream: blocks of 16 rows with their scales (cpu/layout.h).

A pack holds the same numbers as the canonical tensors: `unpack` restores them bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu.native_library import (
    DENSE,
    DTYPES,
    INT4,
    INT8,
    PLAIN,
    Linear,
    check,
    native,
    pointer,
    threads,
)

LARGEST = 1 << 31


@dataclass(frozen=True)
class Pack:
    """A weight[n, k] for the native kernels, with what is needed to restore the canonical tensors.

    data: uint8 [bytes], or float32 [n, k] where kind is DENSE. group: values along K that share a scale. half_scales:
    scales (and minimums) are stored as float16. offset: "none" or "minimum". bias: float32 [n] or None.
    """

    kind: int
    n: int
    k: int
    group: int
    half_scales: bool
    offset: str
    data: Tensor
    bias: Tensor | None

    def struct(self) -> Linear:
        """The C structure. It points into this pack's tensors, which must outlive it."""
        minimum = int(self.offset == "minimum")
        shape = (self.kind, int(self.half_scales), minimum, 0, self.n, self.k, self.group)
        return Linear(*shape, pointer(self.data), pointer(self.bias))

    @property
    def bytes(self) -> int:
        """Bytes that one linear call reads."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


def why_not(n: int, k: int, group: int, offset: str) -> str | None:
    """Why a weight[n, k] cannot be packed, or None. offset: "none", "minimum" or "zero_point"."""
    if max(n, k) > LARGEST:
        return f"{n} x {k} is more than {LARGEST} rows or columns"
    if group != k and group % 32:
        return f"groups of {group} are not a multiple of 32"
    if offset == "zero_point":
        return "integer zero points are not packed"
    return None


def pack_int8(q: Tensor, scale: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Pack:
    """Pack q[N, K] int8 with scale[N, G]. out: uint8 memory for the pack, such as a slice of a larger block."""
    return _pack(INT8, q, scale, None, bias, out)


def pack_int4(
    q: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None = None, out: Tensor | None = None
) -> Pack:
    """Pack q[N, K / 2] nibbles with scale[N, G] and offset[N, G]: None, or a float minimum. out: as in `pack_int8`."""
    return _pack(INT4, q, scale, offset, bias, out)


def dense(weight: Tensor, bias: Tensor | None = None) -> Pack:
    """A float weight[N, K] as a float32 Pack."""
    n, k = weight.shape
    wide = weight.detach().to(torch.float32).contiguous()
    return Pack(DENSE, n, k, k, False, "none", wide, _float(bias))


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _is_half(*tensors: Tensor | None) -> bool:
    """Whether float16 represents all of these float32 values exactly."""
    return all(bool((t.half().float() == t).all()) for t in tensors if t is not None)


def _pack(kind: int, q: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Pack:
    n, groups = scale.shape
    k = q.shape[1] * (2 if kind == INT4 else 1)
    if offset is not None and not offset.is_floating_point():
        raise KernelError("integer zero points are not packed for the CPU: convert them to float minimums")
    scales, minimums = _float(scale), _float(offset)
    assert scales is not None
    half = groups > 1 and _is_half(scales, minimums)
    shape = Pack(kind, n, k, k // groups, half, "none" if offset is None else "minimum", q, None).struct()
    size = native().ap_pack_bytes(byref(shape))
    if size < 0:
        raise KernelError(f"a weight of {n} x {k} with groups of {k // groups} cannot be packed for the CPU")
    data = aligned(size) if out is None else out
    if data.dtype != torch.uint8 or data.numel() != size or data.data_ptr() % 64:
        raise KernelError(f"memory for this pack is {size} bytes that begin at a multiple of 64")
    values = q.contiguous()
    check(
        native().ap_pack(byref(shape), pointer(values), pointer(scales), pointer(minimums), pointer(data)),
        f"to pack a weight of {n} x {k}",
    )
    return Pack(kind, n, k, k // groups, half, "none" if offset is None else "minimum", data, _float(bias))


def pack_bytes(pack: Pack) -> int:
    """Bytes of a pack of this shape; -1 where it cannot be packed."""
    shape = replace(pack, bias=None).struct()
    return int(native().ap_pack_bytes(byref(shape)))


def unpack(pack: Pack) -> tuple[Tensor, Tensor, Tensor | None]:
    """Restore (q, scale, offset); scale and offset in float32."""
    q = torch.empty(pack.n, pack.k // (2 if pack.kind == INT4 else 1), dtype=torch.int8, device="cpu")
    scale = torch.empty(pack.n, pack.k // pack.group, **PLAIN)
    offset = torch.empty_like(scale) if pack.offset == "minimum" else None
    shape = pack.struct()
    check(
        native().ap_unpack(byref(shape), pointer(pack.data), pointer(q), pointer(scale), pointer(offset)), "to unpack"
    )
    return q, scale, offset


def aligned(size: int) -> Tensor:
    """uint8 memory aligned to 64 bytes."""
    whole = torch.empty(size + 63, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % 64
    return whole[start : start + size]


def concatenated(packs: Sequence[Pack]) -> list[Pack]:
    """Move packs into one block of memory, in this order, on huge pages where the system has them.

    A step that reads them in order then reads one stream.
    """
    starts, total = [], 0
    for pack in packs:
        starts.append(total)
        total += -(-pack.data.nbytes // 64) * 64
    block = aligned(total)
    native().ap_advise_large_pages(block.data_ptr(), total)
    moved = []
    for pack, start in zip(packs, starts, strict=True):
        place = block[start : start + pack.data.nbytes].view(pack.data.dtype).view(pack.data.shape)
        moved.append(replace(pack, data=place.copy_(pack.data)))
    return moved


def linear(x: Tensor, pack: Pack) -> Tensor:
    """y[..., N] = x[..., K] @ weight^T + bias in x's dtype (float32, bfloat16 or float16). x may have any strides."""
    rows, stride = _rows(x, pack)
    y, struct = torch.empty(*x.shape[:-1], pack.n, dtype=x.dtype, device="cpu"), pack.struct()
    status = native().ap_linear_run(
        byref(struct), pointer(rows), rows.shape[0], stride, pointer(y), pack.n, DTYPES[x.dtype], threads()
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
