"""A linear layer with int8 weight and int8 activations, and the smoothing that its weight has taken in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.modules.norm import SMOOTHED
from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.quantized_linear import QuantizedLinear
from accelpatch.modules.replacement import adopt, runs_original, without_casts
from accelpatch.modules.weight_view import UnpackedWeight, WeightView
from accelpatch.quant.formats import dequantize
from accelpatch.quant.smoothing import SiteStatistics

SMOOTHING = ("factors", "divisors")


class W8A8Linear(QuantizedLinear):
    """y = x in int8 . q^T * scales + bias: one scale a row of the weight; of x one a token, or a static one.

    factors[K], divisors[N]: what the weight has been multiplied and divided by (quant/smoothing.py); `weight` is read
    and written without them. None where nothing is smoothed, or where the model came smoothed from a checkpoint.
    """

    own_buffers = ("like", *SMOOTHING)

    factors: Tensor | None
    divisors: Tensor | None

    @property
    def weight(self) -> Tensor:
        """Without the smoothing; but with it for the original's forward, which gets the inputs of this module."""
        return self._with_smoothing() if runs_original(self) and self.is_packed else super().weight

    @weight.setter
    def weight(self, value: Any) -> None:
        PackedWeight.weight.fset(self, value)  # type: ignore[attr-defined]

    def _with_smoothing(self) -> WeightView:
        """A view of the weight that this module multiplies by; what is written there is packed."""
        with torch.inference_mode(False), torch.no_grad():
            full = super().dequantized()
            held = UnpackedWeight(full, lambda floats: self._write(self._without_smoothing(floats)), self.original)
            return held.view(full.t() if self.transposed else full)

    def _without_smoothing(self, full: Tensor) -> Tensor:
        full = full if self.factors is None else full / self.factors
        return full if self.divisors is None else full * self.divisors[:, None]

    def dequantized(self) -> Tensor:
        full = dequantize(self.layout, torch.promote_types(self.like.dtype, torch.float32))
        return self._without_smoothing(full).to(self.like.dtype)

    def copied_parameters(self) -> dict[str, nn.Parameter]:
        """With the smoothing in the weight: a copy gets the inputs of this module, and its divided bias."""
        full = super().dequantized()
        full = full.t().contiguous() if self.transposed else full
        return {"weight": nn.Parameter(full, requires_grad=self.trainable)}

    def _quantized_like(self, weight: Tensor, held: Any) -> RowMajor:
        return super()._quantized_like(SiteStatistics(None, self.factors, self.divisors).weight(weight), held)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """As of every quantised module; but float weights do not go into a smoothed one: its norm would not follow."""
        if (self.factors is not None or self.divisors is not None) and prefix + "weight" in state_dict:
            errors.append(f"{prefix.rstrip('.')}: {SMOOTHED}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; a cast does not round the smoothing."""
        kept = {name: self._buffers[name] for name in SMOOTHING}
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


def w8a8(original: nn.Module, weight: W8A8Rows, stats: SiteStatistics, packable: bool) -> Any:
    """A W8A8Linear made from `original` that holds `weight`, quantised by these statistics."""
    new = adopt(W8A8Linear, original)
    device = original._parameters["weight"].device  # type: ignore[union-attr]
    for name in SMOOTHING:
        given = getattr(stats, name)
        new.register_buffer(name, None if given is None else given.to(device), persistent=False)
    bias = original._parameters.get("bias")
    if bias is not None and stats.divisors is not None:
        divided = stats.vector(bias.detach()).to(bias.dtype)
        new._parameters["bias"] = nn.Parameter(divided, requires_grad=bias.requires_grad)
    new.hold(weight, original, packable)
    return new
