"""What all tokens of an attention layer share, as its kernels take it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_NEW_TOKENS = 8  # new tokens of a row in a decode step


class Zeros:
    """int32 zeros that launches leave as they were: there blocks count what is done, and hand each other their results.

    Layers share them, and every number of rows and tokens: one launch follows the other, so a model runs on one stream
    at a time; two launches at once would take each other's, now and ever after. They stay where they are, since
    captured launches know them by their address: where more are asked for, the old ones remain.
    """

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def first(self, count: int, device: torch.device) -> Tensor:
        """`count` of them on a device."""
        fitting = [zeros for zeros in self.held if zeros.device == device and len(zeros) >= count]
        if not fitting:
            fitting = [torch.zeros(count, dtype=torch.int32, device=device)]
            self.held += fitting
        return fitting[-1][:count]


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
    memory: Zeros = field(default_factory=Zeros, repr=False)

    @property
    def columns(self) -> int:
        """Of qkv."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that the rotary embedding turns: the first ones."""
        return 2 * self.inv_freq.shape[0]
