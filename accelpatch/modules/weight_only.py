"""Linear layers and embeddings with a quantised weight; activations stay float.

The weight is held as `q`, `scale` and `offset` (see quant/); `weight` gives it back as floats in the original's dtype
and shape, for code that asks. Each class stands for nn.Linear, transformers' Conv1D or nn.Embedding alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.int4_linear import int4_linear
from accelpatch.kernels.int8_embedding import int8_embedding
from accelpatch.kernels.int8_linear import int8_linear
from accelpatch.modules.replacement import take_over
from accelpatch.quant import int4, int8
from accelpatch.quant.weight import QuantizedWeight


class QuantizedModule(nn.Module):
    """What the quantised modules share: the packed weight, its float form, and moves between devices and dtypes.

    q[N, K] (or packed), scale[N, G], offset[N, G] or None. `like` is empty: it carries the device and the dtype of
    the weight that was replaced, and follows `model.to(...)` while `scale` keeps its precision.
    """

    q: Tensor
    scale: Tensor
    offset: Tensor | None
    like: Tensor
    transposed: bool

    def hold(self, weight: QuantizedWeight, original: nn.Module) -> None:
        """Take `weight` in place of the original's float parameter."""
        parameter = self._parameters.pop("weight")
        assert parameter is not None
        self.transposed = type(original).__name__ == "Conv1D"
        self.register_buffer("q", weight.q)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("offset", weight.offset)
        self.register_buffer("like", torch.empty(0, dtype=parameter.dtype, device=parameter.device), persistent=False)

    def dequantized(self) -> Tensor:
        """The weight as floats, `[N, K]` in the original's dtype."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight as floats in the original's shape; made anew at each access, so it costs time and memory."""
        full = self.dequantized()
        return full.t() if self.transposed else full

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; `model.half()` and the like do not round the scales."""
        kept = {name: self._buffers[name] for name in ("scale", "offset")}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def hand_back(self, original: nn.Module) -> None:
        """Bring the original to where this module was moved, before it takes its place again."""
        original.to(device=self.like.device, dtype=self.like.dtype)


class Int8WeightOnlyLinear(QuantizedModule):
    """y = x @ (q * scale)^T + bias: int8 weight, symmetric, one scale for each output channel or group along K."""

    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return int8.dequantize(QuantizedWeight(self.q, self.scale, None), self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        return int8_linear(x, self.q, self.scale, self.bias)


class Int4WeightOnlyLinear(QuantizedModule):
    """y = x @ w^T + bias: 4-bit weight in groups along K with a minimum, or symmetric where `offset` is None."""

    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return int4.dequantize(QuantizedWeight(self.q, self.scale, self.offset), self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        return int4_linear(x, self.q, self.scale, self.offset, self.bias)


class Int8Embedding(QuantizedModule):
    """Rows of an int8 table as floats; `embed_scale` is applied where the family has it (Gemma)."""

    def dequantized(self) -> Tensor:
        return int8.dequantize(QuantizedWeight(self.q, self.scale, None), self.like.dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids[...] int64 -> [..., K] in the dtype of the table that was replaced."""
        rows = int8_embedding(input_ids, self.q, self.scale, self.like.dtype)
        factor = getattr(self, "embed_scale", None)
        if factor is None:
            return rows
        return rows * (factor.to(rows.dtype) if isinstance(factor, Tensor) else factor)


def quantized(mixin: type[QuantizedModule], original: nn.Module, weight: QuantizedWeight) -> Any:
    """`original` as `mixin`, holding `weight`."""
    new = take_over(mixin, original)
    new.hold(weight, original)
    return new
