"""Weights in the layout that the native CPU kernels stream: blocks of 16 rows with their scales (cpu/layout.h).

A pack holds the same numbers as the canonical tensors: `unpack` restores them bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu.native_library import DENSE, INT4, INT8, PLAIN, ROWS, Linear, check, native, pointer
from accelpatch.kernels.layouts.layout import WeightArguments, nbytes_of, why_not_split

LARGEST = 1 << 31
ALIGNED = 64  # bytes that a pack's memory begins at a multiple of


@dataclass(frozen=True, eq=False)
class Pack:
    """A weight[n, k] for the native kernels, with what is needed to restore the canonical tensors.

    data: uint8 [bytes], or float32 [n, k] where kind is DENSE. kind: DENSE, INT8 or INT4. group: values along K that
    share a scale. half_scales: scales (and minimums) are stored as float16. offset: "none" or "minimum". bias: float32
    [n], which a native step adds, or None.
    """

    part: ClassVar[str] = "all"
    tiled: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    data: Tensor
    kind: int
    n: int
    k: int
    group: int
    half_scales: bool
    offset: str
    bias: Tensor | None = None

    @classmethod
    def pack(
        cls,
        q: Tensor,
        scale: Tensor,
        offset: Tensor | None = None,
        *,
        bits: int,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Pack:
        """From q[N, K] int8 (8 bits) or q[N, K / 2] nibbles (4 bits), scale[N, G] and offset[N, G]: None, or a float
        minimum (4 bits).

        out: uint8 memory for the pack, such as a slice of a larger block. Raises KernelError for what cannot be packed.
        """
        n, groups = scale.shape
        k = q.shape[1] * (1 if bits == 8 else 2)
        kind = "none" if offset is None else "minimum" if offset.is_floating_point() else "zero_point"
        if reason := cls.why_not(n, k, k // groups, kind, bits):
            raise KernelError(f"a weight of {n} x {k} cannot be packed for the CPU: {reason}")
        scales, minimums = _float(scale), _float(offset)
        assert scales is not None
        half = groups > 1 and _is_half(scales, minimums)
        made = cls(q, INT8 if bits == 8 else INT4, n, k, k // groups, half, kind)
        if made.due < 0:
            raise KernelError(f"a weight of {n} x {k} with groups of {k // groups} cannot be packed for the CPU")
        data = aligned(made.due) if out is None else out
        if data.dtype != torch.uint8 or data.numel() != made.due or data.data_ptr() % ALIGNED:
            raise KernelError(f"memory for this pack is {made.due} bytes that begin at a multiple of {ALIGNED}")
        values = q.contiguous()
        status = native().ap_pack(
            byref(made.struct()), pointer(values), pointer(scales), pointer(minimums), pointer(data)
        )
        check(status, f"to pack a weight of {n} x {k}")
        return replace(made, data=data, bias=_float(bias))

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> Pack:
        """From a float weight[N, K], held in float32."""
        n, k = weight.shape
        return cls(weight.detach().to(torch.float32).contiguous(), DENSE, n, k, k, False, "none", _float(bias))

    @classmethod
    def of_arguments(
        cls, data: Tensor, kind: int, n: int, k: int, group: int, half_scales: bool, offset: str, bias: Tensor | None
    ) -> Pack:
        """From `arguments()` and a bias[N] of any float dtype, as an operation takes them."""
        return cls(data, kind, n, k, group, half_scales, offset, _float(bias))

    @staticmethod
    def why_not(n: int, k: int, group: int, offset: str, bits: int = 4) -> str | None:
        """Why a weight[n, k] cannot be packed, or None. offset: "none", "minimum" or "zero_point"."""
        if max(n, k) > LARGEST:
            return f"{n} x {k} is more than {LARGEST} rows or columns"
        if group != k and group % 32:
            return f"groups of {group} are not a multiple of 32"
        if offset == "zero_point":
            return "integer zero points are not packed (convert them to float minimums)"
        return "8 bits have no minimum" if offset == "minimum" and bits == 8 else None

    def unpack(self) -> Any:
        """(q, scale, offset), with scale and offset in float32; of a DENSE pack its weight[N, K]."""
        if self.kind == DENSE:
            return self.data
        q = torch.empty(self.n, self.k // (2 if self.kind == INT4 else 1), dtype=torch.int8, device="cpu")
        scale = torch.empty(self.n, self.k // self.group, **PLAIN)
        offset = torch.empty_like(scale) if self.offset == "minimum" else None
        given = (pointer(self.data), pointer(q), pointer(scale), pointer(offset))
        check(native().ap_unpack(byref(self.struct()), *given), "to unpack")
        return q, scale, offset

    @property
    def w(self) -> Tensor:
        """The weight's memory."""
        return self.data

    @property
    def format(self) -> tuple[Any, ...]:
        """Packs of one format can be concatenated."""
        return Pack, self.kind, self.k, self.group, self.half_scales, self.offset, self.bias is None

    @property
    def nbytes(self) -> int:
        """Bytes that one linear call reads."""
        return nbytes_of((self.data, self.bias))

    @property
    def due(self) -> int:
        """Bytes of a pack of this shape; -1 where it cannot be packed."""
        if self.kind == DENSE:
            return 4 * self.n * self.k
        return int(native().ap_pack_bytes(byref(replace(self, bias=None).struct())))

    def arguments(self) -> tuple[Any, ...]:
        """What `packed_linear` takes between x and the bias."""
        return self.data, self.kind, self.n, self.k, self.group, self.half_scales, self.offset

    def launch(self) -> WeightArguments:
        """Raises KernelError: no GPU kernel reads a pack."""
        raise KernelError("a pack is the CPU's layout: no GPU kernel reads it")

    def struct(self) -> Linear:
        """The C structure. It points into this pack's tensors, which must outlive it."""
        minimum = int(self.offset == "minimum")
        shape = (self.kind, int(self.half_scales), minimum, 0.0, self.n, self.k, self.group)
        return Linear(*shape, pointer(self.data), pointer(self.bias))

    @staticmethod
    def in_one_block(packs: Sequence[Pack]) -> list[Pack]:
        """Move packs into one block of memory, in this order, on huge pages where the system has them.

        A step that reads them in order then reads one stream.
        """
        starts, total = [], 0
        for pack in packs:
            starts.append(total)
            total += -(-pack.data.nbytes // ALIGNED) * ALIGNED
        block = aligned(total)
        native().ap_advise_large_pages(block.data_ptr(), total)
        moved = []
        for pack, start in zip(packs, starts, strict=True):
            place = block[start : start + pack.data.nbytes].view(pack.data.dtype).view(pack.data.shape)
            moved.append(replace(pack, data=place.copy_(pack.data)))
        return moved

    @staticmethod
    def why_not_concat(parts: Sequence[Pack]) -> str | None:
        """Why packs of one format cannot be concatenated: their blocks are not full. None where they can."""
        full = all(one.kind == DENSE or one.n % ROWS == 0 for one in parts)
        return None if full else f"the number of rows in a pack is not a multiple of {ROWS}"

    @classmethod
    def concat(cls, parts: Sequence[Pack]) -> Pack:
        """Row after row, in memory of its own: a copy."""
        if reason := cls.why_not_concat(parts):
            raise KernelError(reason)
        biases = [one.bias for one in parts if one.bias is not None]
        data = aligned(sum(one.data.nbytes for one in parts)).view(parts[0].data.dtype)
        torch.cat([one.data.flatten() for one in parts], out=data)
        n = sum(one.n for one in parts)
        shape = (n, *parts[0].data.shape[1:]) if parts[0].kind == DENSE else data.shape
        return replace(parts[0], data=data.view(shape), n=n, bias=torch.cat(biases) if biases else None)

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """As of tiles, where rows lie in blocks."""
        return why_not_split(self, rows, 1 if self.kind == DENSE else ROWS)

    def split(self, rows: Sequence[int]) -> list[Pack]:
        """Packs of so many rows each: views, or copies where a part does not begin at a multiple of 64 bytes."""
        if reason := self.why_not_split(rows):
            raise KernelError(reason)
        row_bytes = 1 if self.kind == DENSE else self.data.numel() // self.n
        sizes = [count * row_bytes for count in rows]
        biases = [None] * len(rows) if self.bias is None else self.bias.split(list(rows))
        parts = zip(self.data.split(sizes), rows, biases, strict=True)
        return [replace(self, data=_aligned(data), n=count, bias=bias) for data, count, bias in parts]


def aligned(size: int) -> Tensor:
    """uint8 memory aligned to 64 bytes."""
    whole = torch.empty(size + ALIGNED - 1, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % ALIGNED
    return whole[start : start + size]


def _aligned(data: Tensor) -> Tensor:
    """The same bytes at a multiple of 64."""
    if data.data_ptr() % ALIGNED == 0 or data.dtype != torch.uint8:
        return data
    return aligned(data.numel()).copy_(data)


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _is_half(*tensors: Tensor | None) -> bool:
    """Whether float16 represents all of these float32 values exactly."""
    return all(bool((t.half().float() == t).all()) for t in tensors if t is not None)
