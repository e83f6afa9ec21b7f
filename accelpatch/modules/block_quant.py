"""Linear layers and embeddings that hold GGUF's blocks as they are stored; activations stay float."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.gguf_blocks import columns
from accelpatch.kernels.ops.linear.block_linear import block_embedding, block_linear
from accelpatch.kernels.ops.linear.packed_linear import packed_linear
from accelpatch.modules.autocast import autocast
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.weight_only import QuantizedEmbedding
from accelpatch.quant import blocks
from accelpatch.quant.blocks import BlockWeight


class BlockQuantModule(QuantizedModule):
    """Base of both: q uint8[N, row bytes] is the only tensor. form: a key of layouts.gguf_blocks.FORMS."""

    form: str

    def canonical(self) -> BlockWeight:
        """The blocks, whatever the device's layout."""
        holder = self.held
        q = holder.q if holder.pack is None else holder.pack.unpack()
        assert q is not None
        return BlockWeight(q)

    def dequantized(self) -> Tensor:
        return blocks.dequantize(self.canonical().q, self.form, self.like.dtype)

    def _pack(self, weight: BlockWeight) -> Pack:
        return Pack.of_blocks(weight.q, columns(self.form, weight.q.shape[1]), self.form)

    def sizes(self, held: BlockWeight) -> list[int]:
        return [held.q.shape[0], columns(self.form, held.q.shape[1])]

    def quantized_like(self, weight: Tensor, held: BlockWeight) -> Any:
        raise KernelError(
            f"{self.form} is read from GGUF files and not made: floats cannot be written into this weight"
        )


class BlockQuantLinear(BlockQuantModule):
    """y = x @ w^T + bias, w in blocks with scales of their own."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        holder = self.held
        if holder.pack is not None:
            return packed_linear(autocast(x), *holder.pack.arguments(), self.bias)
        assert holder.q is not None
        return block_linear(autocast(x), holder.q, self.form, self.bias)


class BlockQuantEmbedding(BlockQuantModule, QuantizedEmbedding):
    """An embedding whose rows lie in blocks."""

    def _unpacked_rows(self, input_ids: Tensor) -> Tensor:
        holder = self.held
        assert holder.q is not None
        return block_embedding(input_ids, holder.q, self.form, self.like.dtype)
