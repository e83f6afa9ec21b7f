"""What fused layers of encoders and of encoder-decoders are made of, for any number of rows.

Activations that go into products of 8 bits are made by the operation before: norm and rows, or activation and rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from accelpatch.fusion.fused_layer import activations_of
from accelpatch.kernels.ops.activation.activated_rows import activated_rows
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated
from accelpatch.kernels.ops.activation.gated_rows import gated_rows
from accelpatch.kernels.ops.activation.quantize_rows import QuantizedRows
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.models.family import PLAIN_ACTIVATIONS

#: class of an activation -> its name among those of `gated_activation.ACTIVATIONS`
ACTIVATION_CLASSES: Mapping[str, str] = {**PLAIN_ACTIVATIONS, "QuickGELUActivation": "quick_gelu"}


def normed(norm: FusedNorm, x: Tensor, residual: Tensor | None, layer: Any, post: bool) -> tuple[Any, Tensor]:
    """(norm(s) as `layer` takes it, what the next sum takes) for s = x + residual. post: that is norm(s), else s."""
    form = activations_of(layer)
    if form is None:
        y, total = norm.of_sum(x, residual)
        return y, y if post else total
    weight: Any = layer.weight
    return norm.rows_of_sum(x, residual, weight.input_scale, weight.w.dtype, post)


def mlp(up: Any, activation: str, down: Any, is_gated: bool, taken: Any) -> Tensor:
    """down(activation(up(x))) of what `normed` gives for `up`. is_gated: the activation's columns come first in `up`,
    then those that it multiplies."""
    y, form = up.large_m(taken), activations_of(down)
    if form is None:
        plain: Tensor = down.large_m(gated(y, activation) if is_gated else ACTIVATIONS[activation](y))
        return plain
    rows, weight = gated_rows if is_gated else activated_rows, cast(Any, down.weight)
    made = rows.function(y, activation, weight.input_scale, weight.w.dtype)
    last: Tensor = down.large_m(QuantizedRows(*made, y.dtype))
    return last
