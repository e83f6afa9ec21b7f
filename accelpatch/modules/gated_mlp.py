"""The gated MLP: down(act(gate(x)) * up(x)) with the activation and the product as one operation."""

from __future__ import annotations

from torch import Tensor, nn

from accelpatch.kernels.gated_activation import gated_activation


class GatedMLP(nn.Module):
    """With separate gate_proj and up_proj (Llama), or both as the halves of gate_up_proj (Phi-3: `fused_rows`)."""

    activation: str
    fused_rows: bool
    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states[..., K] -> [..., K]."""
        if self.fused_rows:
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        down: Tensor = self.down_proj(gated_activation(gate, up, self.activation))
        return down
