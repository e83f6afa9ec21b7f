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
from accelpatch.kernels.codebooks import CODEBOOKS, E4M3, NVFP4, table
from accelpatch.kernels.cpu.native_library import (
    DENSE,
    E4M3_SCALES,
    INT3,
    INT4,
    INT8,
    OFFSETS,
    PLAIN,
    Q4_K,
    Q6_K,
    ROWS,
    TABLE,
    W8A8,
    Linear,
    check,
    native,
    pointer,
)
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks
from accelpatch.kernels.layouts.layout import WeightArguments, nbytes_of, why_not_split
from accelpatch.kernels.layouts.pack_adapters import PackAdapters
from accelpatch.kernels.layouts.pack_tensors import (
    ALIGNED,
    aligned,
    as_float,
    as_order,
    as_zero_points,
    is_half,
    realigned,
)
from accelpatch.kernels.layouts.row_major import Int3Rows, Int4Rows, Int8Rows, Plain

LARGEST, SUPERBLOCK = 1 << 31, 256  # rows or columns of a pack; values of a block of Q4_K or Q6_K
#: GGUF's name -> kind, bytes of a superblock, values that share a scale
FORMS = {"Q4_K": (Q4_K, 144, 32), "Q6_K": (Q6_K, 210, 16)}


@dataclass(frozen=True, eq=False)
class Pack:
    """A weight[n, k] for the native kernels, with what is needed to restore the canonical tensors.

    data: uint8 [bytes], or float32 [n, k] where kind is DENSE. kind: DENSE, INT8, INT4, INT3, TABLE, Q4_K or Q6_K.
    group: values along K that share a scale. half_scales: scales (and minimums) are stored as float16. offset: "none",
    "minimum" or "zero_point". codes: of a TABLE, its name in CODEBOOKS; rows of nvfp4 have factors there too. order:
    int32 [k], column j of the weight multiplies x[order[j]], or None. bias: float32 [n], which a native step adds, as
    it does low, its adapters; or None. scale_dtype: of the canonical scale (and minimum).
    """

    part: ClassVar[str] = "all"
    tiled: ClassVar[bool] = False
    orders: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = False
    data: Tensor
    kind: int
    n: int
    k: int
    group: int
    half_scales: bool
    offset: str
    codes: str = ""
    order: Tensor | None = None
    bias: Tensor | None = None
    scale_dtype: torch.dtype = torch.float32
    low: PackAdapters | None = None

    @classmethod
    def of(cls, rows: Any) -> Pack:
        """From Int8Rows, Int4Rows or Int3Rows. Raises KernelError for what cannot be packed."""
        bits, offset, codes = rows.bits, getattr(rows, "offset", None), getattr(rows, "codes", "")
        made = cls.pack(rows.w, rows.scale, offset, bits=bits, codes=codes, order=rows.order)
        return replace(made, scale_dtype=rows.scale.dtype)

    def canonical(self) -> Any:
        """The weight that it was made of."""
        if self.kind == DENSE:
            return Plain(self.data)
        if self.form is not None:
            return GgufBlocks(self.unpack(), self.form)
        q, scale, offset = self.unpack()
        scale = scale.to(E4M3 if self.codes == NVFP4 else self.scale_dtype)
        if self.kind == INT8:
            return Int8Rows(q, scale, order=self.order)
        offset = offset.to(self.scale_dtype) if self.offset == "minimum" else offset
        if self.kind == INT3:
            return Int3Rows(q, scale, offset, order=self.order)
        return Int4Rows(q, scale, offset, self.codes, order=self.order)

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        """It is the CPU's."""
        return "its weight lies in the CPU's layout"

    @classmethod
    def pack(
        cls, q: Tensor, scale: Tensor, offset: Tensor | None = None, *, bits: int, codes: str = "",
        order: Tensor | None = None, bias: Tensor | None = None, out: Tensor | None = None,
    ) -> Pack:  # fmt: skip
        """From q[N, K] int8 (8 bits), q[N, K / 2] nibbles (4 bits) or q[N, 3 K / 8] (3 bits), scale[N, G] and
        offset[N, G]: None, or of 4 and 3 bits a float minimum or an integer zero point in 0..16.

        codes: a name in CODEBOOKS where nibbles stand for a table's values. order: integers [K], column j of q
        multiplies x[order[j]]. out: uint8 memory for the pack, such as a slice of a larger block. Raises KernelError
        for what cannot be packed.
        """
        n, groups = scale.shape
        k = q.shape[1] * 8 // bits
        kind = "none" if offset is None or codes == NVFP4 else "minimum" if offset.is_floating_point() else "zero_point"
        if reason := cls.why_not(n, k, k // groups, kind, bits, codes):
            raise KernelError(f"a weight of {n} x {k} cannot be packed for the CPU: {reason}")
        scales, offsets = as_float(scale), as_float(offset) if kind == "minimum" else as_zero_points(offset)
        half = groups > 1 and codes != NVFP4 and is_half(scales, offsets if kind == "minimum" else None)
        code = TABLE if codes else {8: INT8, 4: INT4, 3: INT3}[bits]
        made = cls(q, code, n, k, k // groups, half, kind, codes, as_order(order, k), as_float(bias))
        return made._filled(q, scales, offsets, out)

    @classmethod
    def of_blocks(
        cls, blocks: Tensor, k: int, form: str, *, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Pack:
        """From GGUF's superblocks, blocks[N, bytes a row] uint8, of form "Q4_K" or "Q6_K": no bit is lost or added.

        out: as of `pack`. Raises KernelError for what cannot be packed.
        """
        if reason := cls.why_not_blocks(blocks.shape[0], k, form):
            raise KernelError(f"a weight of {blocks.shape[0]} x {k} cannot be packed for the CPU: {reason}")
        kind, size, group = FORMS[form]
        if blocks.dtype != torch.uint8 or blocks.shape[1:] != (k // SUPERBLOCK * size,):
            raise KernelError(f"{form} of K = {k} is uint8 [N, {k // SUPERBLOCK * size}], not {list(blocks.shape)}")
        made = cls(blocks, kind, blocks.shape[0], k, group, True, "none", bias=as_float(bias))
        return made._filled(blocks, None, None, out)

    def _filled(self, q: Tensor, scale: Tensor | None, offset: Tensor | None, out: Tensor | None) -> Pack:
        if self.due < 0:
            raise KernelError(
                f"a weight of {self.n} x {self.k} with groups of {self.group} cannot be packed for the CPU"
            )
        data = aligned(self.due) if out is None else out
        if data.dtype != torch.uint8 or data.numel() != self.due or data.data_ptr() % ALIGNED:
            raise KernelError(f"memory for this pack is {self.due} bytes that begin at a multiple of {ALIGNED}")
        values = q.contiguous()
        status = native().ap_pack(byref(self.struct()), pointer(values), pointer(scale), pointer(offset), pointer(data))
        check(status, f"to pack a weight of {self.n} x {self.k}")
        return replace(self, data=data)

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> Pack:
        """From a float weight[N, K], which is stored in float32."""
        n, k = weight.shape
        return cls(weight.detach().to(torch.float32).contiguous(), DENSE, n, k, k, False, "none", bias=as_float(bias))

    @classmethod
    def of_arguments(
        cls, data: Tensor, kind: int, n: int, k: int, group: int, half_scales: bool, offset: str, codes: str,
        order: Tensor | None, bias: Tensor | None,
    ) -> Pack:  # fmt: skip
        """From `arguments()` and a bias[N] of any float dtype, as an operation takes them."""
        return cls(data, kind, n, k, group, half_scales, offset, codes, order, as_float(bias))

    @staticmethod
    def why_not(n: int, k: int, group: int, offset: str, bits: int = 4, codes: str = "") -> str | None:
        """Why a weight[n, k] cannot be packed, or None. offset: "none", "minimum" or "zero_point"; codes: of `pack`."""
        if max(n, k) > LARGEST:
            return f"{n} x {k} is more than {LARGEST} rows or columns"
        if (group != k or codes or bits == 3) and group % (multiple := 32 if bits == 3 else 16):
            return f"groups of {group} are not a multiple of {multiple}"
        if bits == 8 and offset != "none":
            return f"8 bits have no {offset.replace('_', ' ')}"
        if not codes:
            return None
        if codes not in CODEBOOKS:
            return f"there is no table {codes!r}, only {', '.join(CODEBOOKS)}"
        return None if (bits, offset) == (4, "none") else f"{codes} has 4 bits and no offset"

    @staticmethod
    def why_not_blocks(n: int, k: int, form: str) -> str | None:
        """Why a weight[n, k] in GGUF's superblocks of `form` cannot be packed, or None."""
        if form not in FORMS:
            return f"blocks of {form} are not packed as they are, only {' and '.join(FORMS)}"
        if max(n, k) > LARGEST:
            return f"{n} x {k} is more than {LARGEST} rows or columns"
        return f"K = {k} is not a multiple of {form}'s {SUPERBLOCK}" if k % SUPERBLOCK else None

    @property
    def form(self) -> str | None:
        """GGUF's name of the superblocks that it was made from; None where it was made from none."""
        return next((name for name, (kind, _, _) in FORMS.items() if kind == self.kind), None)

    def unpack(self) -> Any:
        """What `pack` took, in the pack's order of columns: (q, scale, offset), with scale and a minimum in float32 and
        zero points in int8. Of `of_blocks` the blocks[N, bytes a row]; of a DENSE pack its weight[N, K]."""
        if self.kind == DENSE:
            return self.data
        if self.form is not None:
            blocks = torch.empty(self.n, self.k // SUPERBLOCK * FORMS[self.form][1], dtype=torch.uint8, device="cpu")
            self._emptied(blocks, None, None)
            return blocks
        bits = {INT8: 8, W8A8: 8, INT3: 3}.get(self.kind, 4)
        q = torch.empty(self.n, self.k * bits // 8, dtype=torch.int8, device="cpu")
        scale = torch.empty(self.n, self.k // self.group, **PLAIN)
        offset = torch.empty_like(scale) if self.offset == "minimum" else None
        offset = torch.empty(self.n, 1, dtype=torch.float64, device="cpu") if self.codes == NVFP4 else offset
        if self.offset == "zero_point":
            offset = torch.empty_like(scale, dtype=torch.int8)
        self._emptied(q, scale, offset)
        return q, scale, offset

    def _emptied(self, q: Tensor, scale: Tensor | None, offset: Tensor | None) -> None:
        check(native().ap_unpack(byref(self.struct()), *map(pointer, (self.data, q, scale, offset))), "to unpack")

    @property
    def w(self) -> Tensor:
        """The weight's memory."""
        return self.data

    @property
    def format(self) -> tuple[Any, ...]:
        """Packs of one format can be concatenated."""
        shape = (self.kind, self.k, self.group, self.half_scales, self.offset, self.codes)
        return Pack, *shape, self.order is None, self.bias is None

    @property
    def nbytes(self) -> int:
        """Bytes that one linear call reads."""
        return nbytes_of((self.data, self.order, self.bias))

    @property
    def due(self) -> int:
        """Bytes of a pack of this shape; -1 where it cannot be packed."""
        if self.kind == DENSE:
            return 4 * self.n * self.k
        return int(native().ap_pack_bytes(byref(replace(self, bias=None).struct())))

    def arguments(self) -> tuple[Any, ...]:
        """What `packed_linear` takes between x and the bias."""
        shape = (self.kind, self.n, self.k, self.group, self.half_scales, self.offset, self.codes)
        return self.data, *shape, self.order

    def launch(self) -> WeightArguments:
        """Raises KernelError: no GPU kernel reads a pack."""
        raise KernelError("a pack is the CPU's layout: no GPU kernel reads it")

    def struct(self) -> Linear:
        """The C structure. It points into this pack's tensors, which must outlive it."""
        scales = E4M3_SCALES if self.codes == NVFP4 else int(self.half_scales)
        shape = (self.kind, scales, OFFSETS[self.offset], 0.0, self.n, self.k, self.group)
        values = table(self.codes) if self.codes else None
        made = Linear(*shape, pointer(self.data), pointer(self.bias), pointer(self.order), pointer(values))
        return made if self.low is None else self.low.put_into(made)

    @staticmethod
    def why_not_concat(parts: Sequence[Pack]) -> str | None:
        """Why packs of one format cannot be concatenated: blocks not full, or other orders. None where they can."""
        first = parts[0].order
        if first is not None and not all(one.order is not None and torch.equal(one.order, first) for one in parts):
            return "their columns are not in one order"
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
        return [replace(self, data=realigned(data), n=count, bias=bias) for data, count, bias in parts]
