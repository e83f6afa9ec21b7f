"""Linear layers and embeddings with a quantised weight; activations stay float.

Each class can replace nn.Linear, Conv1D or nn.Embedding, where its computation fits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.ops.linear.fp8_linear import fp8_linear
from accelpatch.kernels.ops.linear.int4_linear import int4_linear
from accelpatch.kernels.ops.linear.int8_embedding import int8_embedding
from accelpatch.kernels.ops.linear.int8_linear import int8_linear
from accelpatch.kernels.ops.linear.packed_linear import packed_embedding, packed_linear
from accelpatch.kernels.ops.linear.tiled_int4_linear import tiled_int4_linear, tiles_for
from accelpatch.modules.autocast import autocast
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.replacement import adopt
from accelpatch.quant import fp8, int4, int8
from accelpatch.quant.weight import AnyWeight, OrderedWeight, QuantizedWeight

Grouped = QuantizedWeight | OrderedWeight


def _order_of(weight: Grouped) -> Tensor | None:
    return weight.order if isinstance(weight, OrderedWeight) else None


class GroupedLinear(QuantizedModule):
    """Base of linear layers quantised in groups along K, whose columns may be in another order than the inputs."""

    bias: Tensor | None
    takes_order = True

    def dequantized(self) -> Tensor:
        held = self.canonical()
        full = self._floats(held)
        if not isinstance(held, OrderedWeight):
            return full
        return torch.empty_like(full).index_copy_(1, held.order.long(), full)

    def quantized_like(self, weight: Tensor, held: Grouped) -> Grouped:
        if not isinstance(held, OrderedWeight):
            return self._quantized(weight, held)
        return OrderedWeight(*self._quantized(weight[:, held.order.long()], QuantizedWeight(*held[:3])), held.order)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        x, order = autocast(x), None if self.held.pack is not None else self.held.order  # a pack has its own
        return self._product(x if order is None else x.index_select(-1, order))

    def _floats(self, held: Grouped) -> Tensor:
        raise NotImplementedError

    def _quantized(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        raise NotImplementedError

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Int8WeightOnlyLinear(GroupedLinear):
    """y = x @ (q * scale)^T + bias: symmetric int8 weight, one scale per output channel or per group along K."""

    def _floats(self, held: Grouped) -> Tensor:
        return int8.dequantize(held, self.like.dtype)

    def _quantized(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        return _int8_like(weight, held)

    def _pack(self, weight: Grouped) -> Pack:
        return Pack.pack(weight.q, weight.scale, bits=8, order=_order_of(weight))

    def _product(self, x: Tensor) -> Tensor:
        holder = self.held
        if holder.pack is not None:
            return packed_linear(x, *holder.pack.arguments(), self.bias)
        assert holder.q is not None
        assert holder.scale is not None
        return int8_linear(x, holder.q, holder.scale, self.bias)


class Int4WeightOnlyLinear(GroupedLinear):
    """y = x @ w^T + bias: 4-bit weight in groups along K, with a minimum, a zero point, or symmetric (no offset)."""

    def _floats(self, held: Grouped) -> Tensor:
        return int4.dequantize(held, self.like.dtype)

    def sizes(self, held: QuantizedWeight) -> list[int]:
        return [held.q.shape[0], 2 * held.q.shape[1]]

    def _quantized(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        return int4.quantize_as(weight, held)

    def _pack(self, weight: Grouped) -> Pack:
        return Pack.pack(weight.q, weight.scale, weight.offset, bits=4, order=_order_of(weight))

    def _tile(self, weight: QuantizedWeight) -> Tiles | None:
        return tiles_for(weight[:3], self.like.dtype, self.like.device)

    def _product(self, x: Tensor) -> Tensor:
        if self.pack is not None:
            return packed_linear(x, *self.pack.arguments(), self.bias)
        if self.tiles is not None:
            return tiled_int4_linear(x, *self.tiles, self.bias)
        assert self.q is not None
        assert self.scale is not None
        return int4_linear(x, self.q, self.scale, self.offset, self.bias)


class Fp8WeightOnlyLinear(QuantizedModule):
    """y = x @ (q * scale)^T + bias: 8-bit float weight, one scale per output channel."""

    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return fp8.dequantize(self.canonical(), self.like.dtype)

    def quantized_like(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        return fp8.quantize(weight, fnuz=held.q.dtype == torch.float8_e4m3fnuz)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        assert self.q is not None
        assert self.scale is not None
        return fp8_linear(autocast(x), self.q, self.scale, self.bias)


def renormalises(module: Any) -> str | None:
    """Why an embedding writes into its table while it runs; None for one that does not, and for any other module."""
    most = getattr(module, "max_norm", None)
    return None if most is None else f"it renormalises the rows that it reads in place (max_norm={most})"


class QuantizedEmbedding(QuantizedModule):
    """Base of embeddings with a quantised table; applies `embed_scale` where the family has it (Gemma)."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids[...] int64 -> [..., K] in the dtype of the replaced table."""
        if renormalises(self):  # set since the patch; what is written is packed again
            given: Tensor = super().forward(input_ids)
            return given
        rows = self._rows(input_ids)
        factor = getattr(self, "embed_scale", None)
        if factor is None:
            return rows
        return rows * (factor.to(rows.dtype) if isinstance(factor, Tensor) else factor)

    def _rows(self, input_ids: Tensor) -> Tensor:
        pack = self.held.pack
        if pack is None:
            return self._unpacked_rows(input_ids)
        return packed_embedding(input_ids, self.like.dtype, *pack.arguments())

    def _unpacked_rows(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError


class Int8Embedding(QuantizedEmbedding):
    """An embedding with an int8 table."""

    def dequantized(self) -> Tensor:
        return int8.dequantize(self.canonical(), self.like.dtype)

    def quantized_like(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        return _int8_like(weight, held)

    def _pack(self, weight: QuantizedWeight) -> Pack:
        return Pack.pack(weight.q, weight.scale, bits=8)

    def _unpacked_rows(self, input_ids: Tensor) -> Tensor:
        holder = self.held
        assert holder.q is not None
        assert holder.scale is not None
        return int8_embedding(input_ids, holder.q, holder.scale, self.like.dtype)


def _int8_like(weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
    half = held.scale.dtype == torch.float16
    return int8.quantize(weight, group_size=held.q.shape[1] // held.scale.shape[1], half_scales=half)


def quantized(
    mixin: type[QuantizedModule], original: nn.Module, weight: AnyWeight | QuantizedModule, packable: bool = False
) -> Any:
    """Make a `mixin` from `original` that holds `weight`, or shares that of another module."""
    new = adopt(mixin, original)
    new.hold(weight, original, packable)
    return new
