"""The matrices of a layer's experts in the layout of the native CPU kernels: one Pack of all rows, expert after expert.

An expert's rows are whole blocks of 16, so that its part of the memory is a pack of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from accelpatch.kernels.codebooks import CODEBOOKS, E8M0, FP8_CODES, NVFP4, scale_dtype
from accelpatch.kernels.cpu.native_library import ROWS
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.pack_tensors import ALIGNED


class ExpertPack(NamedTuple):
    """data: uint8 [E, bytes]. n, k: of each expert; the rest as in Pack. bias[E, n] float32, or None."""

    data: Tensor
    kind: int
    n: int
    k: int
    group: int
    half_scales: bool
    offset: str
    codes: str
    bias: Tensor | None

    @classmethod
    def pack(
        cls, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None, *, bits: int,
        codes: str = "",
    ) -> ExpertPack:  # fmt: skip
        """From q[E, N, K] int8 or [E, N, K / 2] of 4-bit codes, scale and offset[E, N, G]. Raises KernelError.

        codes: of Pack.pack; scales of float8_e8m0fnu are always e2m1's.
        """
        experts, n = q.shape[:2]
        flat = [None if one is None else one.reshape(experts * n, -1) for one in (q, scale, offset)]
        assert flat[0] is not None
        assert flat[1] is not None
        codes = codes or ("e2m1" if scale.dtype == E8M0 else "")
        one = Pack.pack(flat[0], flat[1], flat[2], bits=bits, codes=codes)
        float_bias = None if bias is None else bias.detach().float().contiguous()
        data = one.data.view(experts, -1)
        return cls(data, one.kind, n, one.k, one.group, one.half_scales, one.offset, codes, float_bias)

    @staticmethod
    def why_not(n: int, k: int, group: int, offset: str, bits: int) -> str | None:
        """Why experts of n rows cannot be packed; None where they can. offset: "none" or "minimum", or a
        codebook's name."""
        if offset in (NVFP4, FP8_CODES):
            return f"experts whose codes are of {offset} are not packed"
        if n % ROWS:
            return f"experts of {n} rows are not whole blocks of {ROWS}"
        groups = k // group
        scales = ROWS * groups * (2 if bits == 4 and groups > 1 else 4) * (2 if offset == "minimum" else 1)
        if n // ROWS * (ROWS * k * bits // 8 + scales) % ALIGNED:
            return f"an expert's pack of {n} x {k} would not end at a multiple of {ALIGNED} bytes"
        kind, codes = ("none", offset) if offset in CODEBOOKS else (offset, "")
        return Pack.why_not(n, k, group, kind, bits, codes)

    def of(self, expert: int) -> Pack:
        """The pack of one expert, a view."""
        bias = None if self.bias is None else self.bias[expert]
        return Pack(self.data[expert].contiguous(), *self[1:8], bias=bias)

    def canonical(self, k: int = 0, *, interleaved: bool = False) -> Any:
        """(q, scale, offset, bias) as `pack` takes them, scale and offset in float32, or e2m1's scale in its dtype."""
        experts = len(self.data)
        q, scale, offset = Pack(self.data.reshape(-1), self.kind, experts * self.n, *self[3:8]).unpack()
        if self.codes:
            scale = scale.to(scale_dtype(self.codes))
        return *(None if one is None else one.view(experts, self.n, -1) for one in (q, scale, offset)), self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)
