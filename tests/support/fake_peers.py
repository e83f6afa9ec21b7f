"""Peer memory without a GPU, for jobs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.parallel.peer_memory import PeerMemory


class FakePeers(PeerMemory):
    """`share` fails for `why`, and every sum is `gives`; None for what two ranks' `check` expects."""

    def __init__(self, why: str | None, gives: float | None):
        self._why, self._gives, self._bytes = why, gives, torch.empty(0)

    def share(self) -> None:
        if self._why is not None:
            raise RuntimeError(self._why)

    def summed(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._gives is None:
            return torch.full_like(x, 3.0) + (0.0 if residual is None else residual)
        return torch.full_like(x, self._gives)
