"""What is done to q and k before attention, for the operation in query_key.py and its kernels."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from accelpatch.kernels.spec import Described


@dataclass(frozen=True, eq=False)
class QueryKey(Described):
    """heads, kv_heads, size: of the attention layer. q_norm[Hq D], k_norm[Hkv D]: or None. inv_freq[R / 2]: None where
    no rotary embedding is applied here."""

    heads: int
    kv_heads: int
    size: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    inv_freq: Tensor | None = None
    rope_scaling: float = 1.0

    @property
    def facts(self) -> Hashable:
        """As in Described."""
        rotary = None if self.inv_freq is None else self.inv_freq.shape[0]
        return self.heads, self.kv_heads, self.size, self.q_norm is not None, rotary
