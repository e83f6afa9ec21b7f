"""What all tokens of an attention layer share, as its kernels take it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST = 8  # new tokens of a row in a decode step


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """What all tokens of a layer share. inv_freq[R / 2], R <= D, and q_norm, k_norm[D] (or None) lie on the device.

    scaling: of the scores; rope_scaling: of cosines and sines; window, softcap: 0 for none; plus_one: norms multiply by
    1 + weight, as Gemma's do.
    """

    heads: int
    kv_heads: int
    size: int
    scaling: float
    inv_freq: Tensor
    rope_scaling: float = 1.0
    window: int = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    softcap: float = 0.0
    plus_one: bool = False
    _counters: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)

    def counters(self, what: tuple[int, int], device: torch.device) -> Tensor:
        """int32 zeros, `what[1]` of them, which a launch leaves as they were; the same ones for the same `what`.

        Each layer keeps its own, and they stay where they are: captured launches know them by their address. So a layer
        runs on one stream at a time: two launches at once would count each other's, now and ever after.
        """
        if (what, device) not in self._counters:
            self._counters[what, device] = torch.zeros(what[1], dtype=torch.int32, device=device)
        return self._counters[what, device]

    @property
    def columns(self) -> int:
        """Of qkv."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def turned(self) -> int:
        """Columns of a head that the rotary embedding turns: the first ones."""
        return 2 * self.inv_freq.shape[0]
