"""int8 weights for int8 activations in the layout of the native CPU kernels: an int8 Pack with one scale a row.

The bytes are those of a Pack; what differs is what its input is made into (ops/activation/quantize_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu.native_library import INT8, PLAIN, W8A8, Linear
from accelpatch.kernels.layouts.cpu_pack import LARGEST, Pack
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows

LONGEST = 132104  # K up to which 128 * 127 * K is an int32
LEAST = 2.0**-119  # the inverse of a smaller scale is no float32


@dataclass(frozen=True, eq=False)
class W8A8Pack(Pack):
    """A weight[n, k] for products with int8 activations; its fields as of a Pack, of kind W8A8.

    input_scale: the static scale of its input, a float32; None: each row of x has its own. `unpack` gives (q, scale,
    None), as of an int8 Pack.
    """

    whole_rows: ClassVar[bool] = True
    input_scale: float | None = None

    @classmethod
    def of(cls, rows: W8A8Rows) -> W8A8Pack:
        """As `pack`."""
        return cls.pack(*rows.arguments())

    def canonical(self) -> W8A8Rows:
        """The weight that it was made of."""
        q, scale, _ = self.unpack()
        return W8A8Rows(q, scale, self.static_scale)

    def weight_only(self) -> Pack:
        """The same bytes as a weight for float activations."""
        return Pack(self.data, INT8, self.n, self.k, self.k, False, "none", bias=self.bias)

    @classmethod
    def pack(  # type: ignore[override]
        cls,
        q: Tensor,
        scale: Tensor,
        input_scale: Tensor | float | None = None,
        *,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> W8A8Pack:
        """From q[N, K] int8, scale[N, 1] and input_scale: None, or one positive number. out: as of Pack.pack.

        Raises KernelError for what cannot be packed.
        """
        given = None if input_scale is None else float(torch.as_tensor(input_scale, dtype=torch.float32).item())
        if given is not None and not LEAST <= given < float("inf"):
            raise KernelError(f"the static scale of an input is a positive number, at least 2^-119, not {given}")
        if reason := cls.why_not_w8a8(q.shape[0], q.shape[1], scale.shape[1]):
            raise KernelError(f"a weight of {list(q.shape)} cannot be packed for the CPU: {reason}")
        made = Pack.pack(q, scale, bits=8, bias=bias, out=out)
        return cls(made.data, W8A8, made.n, made.k, made.k, False, "none", bias=made.bias, input_scale=given)

    @classmethod
    def of_w8a8_arguments(
        cls, data: Tensor, n: int, k: int, input_scale: float | None, bias: Tensor | None
    ) -> W8A8Pack:
        """From `arguments()` and a bias[N] of any float dtype, as the operation takes them."""
        float_bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        return cls(data, W8A8, n, k, k, False, "none", bias=float_bias, input_scale=input_scale)

    @staticmethod
    def why_not_w8a8(n: int, k: int, groups: int = 1) -> str | None:
        """Why a weight[n, k] with so many scales a row cannot be packed for int8 activations; None where it can."""
        if groups != 1:
            return f"int8 activations take one scale a row, not {groups}"
        if n > LARGEST:
            return f"{n} x {k} is more than {LARGEST} rows"
        return f"K = {k}: sums of more than {LONGEST} products overflow an int32" if k > LONGEST else None

    @property
    def static_scale(self) -> Tensor | None:
        """input_scale as a tensor[1], as the canonical operations take it."""
        return None if self.input_scale is None else torch.tensor([self.input_scale], **PLAIN)

    @property
    def format(self) -> tuple[Any, ...]:
        """Packs of one format can be concatenated: they have the same static scale."""
        return (*super().format, self.input_scale)

    def arguments(self) -> tuple[Any, ...]:
        """What `w8a8_packed` takes between x and the bias."""
        return self.data, self.n, self.k, self.input_scale

    def struct(self) -> Linear:
        """The C structure. It points into this pack's tensors, which must outlive it."""
        made = super().struct()
        made.input_scale = self.input_scale or 0.0
        return made

    @staticmethod
    def why_not_concat(parts: Sequence[Pack]) -> str | None:
        """As of other packs; static scales of different inputs cannot be concatenated, too."""
        alike = len({getattr(one, "input_scale", None) for one in parts}) == 1
        return Pack.why_not_concat(parts) if alike else "the static scales of their inputs differ"
