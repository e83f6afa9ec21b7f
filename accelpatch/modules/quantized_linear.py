"""Linear layers and embeddings with a quantised weight: one class each, which can replace nn.Linear, Conv1D or
nn.Embedding. The names say the format to who prints the model; its `layout` decides what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.operation import wants_gradient
from accelpatch.kernels.ops.linear.by_layout import embedded, linear
from accelpatch.modules.autocast import autocast
from accelpatch.modules.norm import SMOOTHED
from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.replacement import adopt, runs_original, without_casts
from accelpatch.modules.weight_view import UnpackedWeight, WeightView
from accelpatch.quant import fp8
from accelpatch.quant.formats import dequantize
from accelpatch.quant.smoothing import SMOOTHING, SiteStatistics


class QuantizedLinear(QuantizedModule):
    """y = x @ w^T + bias. The weight is quantised; activations stay float, or are quantised as they come in.

    factors[K], divisors[N]: what the weight has been multiplied and divided by (quant/smoothing.py); `weight` is read
    and written without them. None where nothing is smoothed, or where the model came smoothed from a checkpoint.
    """

    own_buffers: tuple[str, ...] = ("like", *SMOOTHING)

    bias: Tensor | None
    factors: Tensor | None
    divisors: Tensor | None

    @property
    def weight(self) -> Tensor:
        """Without the smoothing; but with it for the original's forward, which gets the inputs of this module."""
        given = self.is_smoothed and self.is_packed and runs_original(self)
        return self._with_smoothing() if given else super().weight

    @weight.setter
    def weight(self, value: Any) -> None:
        PackedWeight.weight.fset(self, value)  # type: ignore[attr-defined]

    @property
    def is_smoothed(self) -> bool:
        """Whether the weight has smoothing in it that is known here."""
        return self.factors is not None or self.divisors is not None

    def _with_smoothing(self) -> WeightView:
        """A view of the weight that this module multiplies by; what is written there is packed."""
        with torch.inference_mode(False), torch.no_grad():
            full = super().dequantized()
            unpacked = UnpackedWeight(full, lambda floats: self._write(self._without_smoothing(floats)), self.original)
            return unpacked.view(full.t() if self.transposed else full)

    def _without_smoothing(self, full: Tensor) -> Tensor:
        full = full if self.factors is None else full / self.factors
        return full if self.divisors is None else full * self.divisors[:, None]

    def dequantized(self) -> Tensor:
        if not self.is_smoothed:
            return super().dequantized()
        full = dequantize(self.layout, torch.promote_types(self.like.dtype, torch.float32))
        return self._without_smoothing(full).to(self.like.dtype)

    def copied_parameters(self) -> dict[str, nn.Parameter]:
        """With the smoothing in the weight: a copy gets the inputs of this module, and its divided bias."""
        if not self.is_smoothed:
            return super().copied_parameters()
        full = super().dequantized()
        full = full.t().contiguous() if self.transposed else full
        return {"weight": nn.Parameter(full, requires_grad=self.trainable)}

    def _quantized_like(self, weight: Tensor, present: Any) -> RowMajor:
        if self.is_smoothed:
            weight = SiteStatistics(None, self.factors, self.divisors).weight(weight)
        return super()._quantized_like(weight, present)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """As of every quantised module; but float weights do not go into a smoothed one: its norm would not follow."""
        if self.is_smoothed and prefix + "weight" in state_dict:
            errors.append(f"{prefix.rstrip('.')}: {SMOOTHED}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; a cast does not round the smoothing."""
        kept = {name: one for name in SMOOTHING if (one := self._buffers.get(name)) is not None}
        super()._apply(fn, recurse)
        without_casts(self, kept)
        return self

    def hand_back(self, original: nn.Module) -> bool:
        """As of every quantised module; the original's bias is moved and cast as one that was divided."""
        bias, own = original._parameters.get("bias"), self._parameters.get("bias")
        if bias is not None and own is not None and own is not bias:
            for dtype in self.dtypes:
                bias.data = bias.data.to(dtype)
            bias.data = bias.data.to(own.device)
            if not bias.is_inference():
                bias.requires_grad_(own.requires_grad)
        return super().hand_back(original)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        return linear(autocast(x), self.layout, self.bias, training=self.training)


class Int8WeightOnlyLinear(QuantizedLinear):
    """Symmetric int8 weight, one scale per output channel or per group along K."""

    takes_order = True


class Int4WeightOnlyLinear(QuantizedLinear):
    """4-bit weight in groups along K, with a minimum, a zero point, or symmetric (no offset)."""

    takes_order = True


class Int3WeightOnlyLinear(QuantizedLinear):
    """3-bit weight in groups along K, as the one of 4 bits."""

    takes_order = True


class CodebookLinear(QuantizedLinear):
    """4-bit codes of a codebook, one scale for each group along K. codes: the codebook's name."""

    codes: str

    def extra_repr(self) -> str:
        """As of the original, and the codebook."""
        return f"{super().extra_repr()}, codes={self.codes}"


class NVFP4Linear(CodebookLinear):
    """The same in NVFP4. input_scale[1]: of the checkpoint it comes from; kept, saved, and not applied."""

    own_buffers = (*CodebookLinear.own_buffers, "input_scale")
    input_scale: Tensor | None

    def hold(self, weight: RowMajor | QuantizedModule, original: nn.Module, packable: bool) -> None:
        super().hold(weight, original, packable)
        given = getattr(weight, "input_scale", None)
        if given is None:
            self.input_scale = None
        else:
            self.register_buffer("input_scale", given.to(self.like.device), persistent=False)

    def canonical(self) -> Any:
        return super().canonical().replace(input_scale=self.input_scale)

    def _quantized_like(self, weight: Tensor, present: Any) -> RowMajor:
        """The scale of its input stays, whatever is written into the weight."""
        return super()._quantized_like(weight, present).replace(input_scale=present.input_scale)

    def _take(self, new: RowMajor) -> None:
        super()._take(new)
        self.input_scale = getattr(new, "input_scale", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; a cast does not round the scale of its input."""
        kept = {} if self.input_scale is None else {"input_scale": self.input_scale}
        super()._apply(fn, recurse)
        without_casts(self, kept)
        return self


class Fp8WeightOnlyLinear(QuantizedLinear):
    """8-bit float weight, one scale per output channel."""


class Fp8BlockLinear(Fp8WeightOnlyLinear):
    """8-bit float weight in blocks of 128 x 128. Where its layout says so, x is rounded to 8-bit floats too, with a
    scale for each 128 values of a token."""

    def _quantized_like(self, weight: Tensor, present: Any) -> RowMajor:
        """In blocks even where a row has one scale, and with the same rounding of x."""
        return fp8.quantize_blocks(weight).replace(rounds=present.rounds)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        x = autocast(x)
        wanted = self.training or wants_gradient((x, self.bias))  # which rounding has none of
        rounds = self.layout.rounds and not wanted
        return linear(fp8.rounded(x) if rounds else x, self.layout, self.bias, training=self.training)


class W8A8Linear(QuantizedLinear):
    """int8 weight and int8 activations: one scale a row of the weight; of x one a token, or a static one."""


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
    mixin: type[QuantizedModule], original: nn.Module, weight: RowMajor | QuantizedModule, packable: bool = False,
    stats: SiteStatistics | None = None,
) -> Any:  # fmt: skip
    """Make a `mixin` from `original` that holds `weight`, or shares that of another module.

    stats: of a linear layer's weight that was quantised with the smoothing in it.
    """
    new = adopt(mixin, original)
    if issubclass(mixin, QuantizedLinear):
        _smoothed(new, original, stats or SiteStatistics())
    new.hold(weight, original, packable)
    return new


def _smoothed(new: Any, original: nn.Module, stats: SiteStatistics) -> None:
    """Let a module know the smoothing of its weight, and divide its bias."""
    device = original._parameters["weight"].device  # type: ignore[union-attr]
    for name in SMOOTHING:
        given = getattr(stats, name)
        if given is None:
            setattr(new, name, None)  # no empty buffer, which hooks that move buffers do not expect
        else:
            new.register_buffer(name, given.to(device), persistent=False)
    bias = original._parameters.get("bias")
    if bias is not None and stats.divisors is not None:
        divided = stats.vector(bias.detach()).to(bias.dtype)
        new._parameters["bias"] = nn.Parameter(divided, requires_grad=bias.requires_grad)
