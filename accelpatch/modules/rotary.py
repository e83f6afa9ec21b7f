"""The rotary embedding's cosines and sines, computed in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.kernels.ops.attention.rope import rotary_cos_sin
from accelpatch.modules.replacement import Replacement


class FusedRotaryEmbedding(Replacement):
    """cos and sin of position * inv_freq, for rope types whose frequencies do not depend on the sequence length.

    The frequencies are the original's buffers: `inv_freq`, or `{layer_type}_inv_freq` in families that have several.
    """

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """position_ids[B, L] int64 -> (cos, sin)[B, L, D] in x's dtype."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq, scaling = getattr(self, f"{prefix}inv_freq"), getattr(self, f"{prefix}attention_scaling")
        return rotary_cos_sin(position_ids, inv_freq, scaling, x.dtype)
