"""Linear layers with 4-bit codes of a codebook; activations stay float."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.ops.linear.codebook_linear import codebook_linear
from accelpatch.kernels.ops.linear.packed_linear import packed_linear
from accelpatch.kernels.ops.linear.tiled_int4_linear import tiled_int4_linear, tiles_of_codes
from accelpatch.modules.autocast import autocast
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.quant import codebook
from accelpatch.quant.weight import QuantizedWeight


class CodebookLinear(QuantizedModule):
    """y = x @ (BOOK[u] * scale)^T + bias: 4-bit codes, one float32 scale for each group along K."""

    codebook: ClassVar[str]
    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return codebook.dequantize(self.canonical(), self.codebook, self.like.dtype)

    def sizes(self, held: QuantizedWeight) -> list[int]:
        return [held.q.shape[0], 2 * held.q.shape[1]]

    def quantized_like(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        group = 2 * held.q.shape[1] // held.scale.shape[1]
        return codebook.quantize(weight, group_size=group, codebook=self.codebook)

    def _pack(self, weight: QuantizedWeight) -> Pack:
        return Pack.pack(weight.q, weight.scale, bits=4, codes=self.codebook)

    def _tile(self, weight: QuantizedWeight) -> Tiles | None:
        return tiles_of_codes(weight.q, weight.scale, self.codebook, self.like.dtype, self.like.device)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        if self.pack is not None:
            return packed_linear(autocast(x), *self.pack.arguments(), self.bias)
        if self.tiles is not None:
            return tiled_int4_linear(autocast(x), *self.tiles, self.bias)
        assert self.q is not None
        assert self.scale is not None
        return codebook_linear(autocast(x), self.q, self.scale, self.codebook, self.bias)


class NF4WeightOnlyLinear(CodebookLinear):
    """Codes of nf4."""

    codebook = "nf4"


class FP4WeightOnlyLinear(CodebookLinear):
    """Codes of fp4."""

    codebook = "fp4"
