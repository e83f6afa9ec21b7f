"""Linear layers and embeddings with a quantised weight: one class each, which can replace nn.Linear, Conv1D or
nn.Embedding. The names say the format to who prints the model; its `layout` decides what is computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.ops.linear.by_layout import embedded, linear
from accelpatch.modules.autocast import autocast
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.replacement import adopt


class QuantizedLinear(QuantizedModule):
    """y = x @ w^T + bias. The weight is quantised; activations stay float, or are quantised as they come in."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        return linear(autocast(x), self.layout, self.bias)


class Int8WeightOnlyLinear(QuantizedLinear):
    """Symmetric int8 weight, one scale per output channel or per group along K."""

    takes_order = True


class Int4WeightOnlyLinear(QuantizedLinear):
    """4-bit weight in groups along K, with a minimum, a zero point, or symmetric (no offset)."""

    takes_order = True


class CodebookLinear(QuantizedLinear):
    """4-bit codes of a codebook, one scale for each group along K. codes: the codebook's name."""

    codes: str

    def extra_repr(self) -> str:
        """As of the original, and the codebook."""
        return f"{super().extra_repr()}, codes={self.codes}"


class Fp8WeightOnlyLinear(QuantizedLinear):
    """8-bit float weight, one scale per output channel."""


class Fp8Linear(QuantizedLinear):
    """Weight and activations in 8-bit floats: one scale a row of the weight, and one a token of x."""


class BlockQuantLinear(QuantizedLinear):
    """A weight in GGUF's blocks as they are stored, with scales of their own."""


def renormalises(module: Any) -> str | None:
    """Why an embedding writes into its table while it runs; None for one that does not, and for any other module."""
    most = getattr(module, "max_norm", None)
    return None if most is None else f"it renormalises the rows that it reads in place (max_norm={most})"


class QuantizedEmbedding(QuantizedModule):
    """An embedding with a quantised table; applies `embed_scale` where the family has it (Gemma)."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids[...] int64 -> [..., K] in the dtype of the replaced table."""
        if renormalises(self):  # set since the patch; what is written is packed again
            given: Tensor = super().forward(input_ids)
            return given
        rows = embedded(input_ids, self.layout, self.like.dtype)
        factor = getattr(self, "embed_scale", None)
        if factor is None:
            return rows
        return rows * (factor.to(rows.dtype) if isinstance(factor, Tensor) else factor)


class Int8Embedding(QuantizedEmbedding):
    """An embedding with an int8 table."""


class BlockQuantEmbedding(QuantizedEmbedding):
    """An embedding whose rows lie in GGUF's blocks."""


def quantized(
    mixin: type[QuantizedModule], original: nn.Module, weight: RowMajor | QuantizedModule, packable: bool = False
) -> Any:
    """Make a `mixin` from `original` that holds `weight`, or shares that of another module."""
    new = adopt(mixin, original)
    new.hold(weight, original, packable)
    return new
