"""The gated MLP, down(act(gate(x)) * up(x)), with the activation and the multiplication as one operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accelpatch.kernels.ops.activation.gated_activation import gated_activation
from accelpatch.kernels.ops.linear.by_layout import linear
from accelpatch.modules.replacement import Replacement, intact, is_observed


def side_by_side(gate: Any, up: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(gate(x), up(x)); in one GEMM where their weights share interleaved tiles and no hook observes either module."""
    tiles: Any
    tiles, others = (getattr(module, "layout", None) for module in (gate, up))
    tiled = tiles is not None and others is not None and tiles.tiled and tiles.w is others.w
    if not tiled or gate.bias is not None or up.bias is not None or is_observed(gate, up):
        return gate(x), up(x)
    both = linear(x, tiles.replace(n=2 * tiles.n, part="both"), None)
    return both[..., : tiles.n], both[..., tiles.n :]


class GatedMLP(Replacement):
    """A gated MLP with separate gate_proj and up_proj (Llama), or one gate_up_proj (Phi-3; `fused_rows`)."""

    activation: str
    fused_gate_up: bool
    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states[..., K] -> [..., K]. Runs the original's forward if the activation was
        changed or is observed."""
        if not intact(self):
            return super().forward(hidden_states)
        if self.fused_gate_up:
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        else:
            gate, up = side_by_side(self.gate_proj, self.up_proj, hidden_states)
        return self.down_proj(gated_activation(gate, up, self.activation))
