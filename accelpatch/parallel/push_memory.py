"""The one-shot all-reduce by our own kernel: each rank writes its part into the others' memory, and adds up what comes.

A message takes one way over the link, where reading takes a signal and two; a residual is added in the same launch.
The norm that follows is not in it: it is part of the next linear layer's kernel, which every rank runs on whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.hip.collective import binding
from accelpatch.parallel.peer_memory import ALIGNED, MOST, PUSH, PeerMemory

PATIENCE = 1 << 22  # looks for the others' parts while it is checked: several seconds


class PushMemory(PeerMemory):
    """Memory on each GPU that all others write to, and sums by the kernel of kernels/hip/collective.

    Raises KernelError where the kernel cannot be compiled.
    """

    way = PUSH
    dtypes = binding.DTYPES

    def __init__(self, device: torch.device | None, group: Any):
        super().__init__(device, group)
        assert device is not None
        libraries.library(binding.NAME, probe(device))
        self._bytes.fill_(255)
        self._slot_numbers = torch.zeros(binding.MOST_BLOCKS, dtype=torch.int32, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # before another rank writes
        self._patience = 0
        self._ranks: binding.Ranks | None = None

    def _size(self) -> int:
        assert binding.MOST_BYTES == MOST
        world = self._group.size()
        if world > binding.MOST_RANKS:
            raise RuntimeError(f"it is for up to {binding.MOST_RANKS} ranks, and these are {world}")
        return binding.memory_bytes(world)

    def share(self) -> None:
        """Find the other ranks' memory. Raises RuntimeError where that cannot be."""
        handle: Any = self._symmetric.rendezvous(self._bytes, self._group)
        memory = [at + getattr(handle, "offset", 0) for at in handle.buffer_ptrs]
        if memory[handle.rank] != self._bytes.data_ptr():
            raise RuntimeError("torch's symmetric memory gives no addresses that kernels can use")
        self._ranks = binding.Ranks(handle.rank, memory, self._slot_numbers, self._failed)

    def check(self, rank: int, world: int) -> None:
        """Raise RuntimeError where a sum is wrong, or parts of another rank do not come."""
        self._patience = PATIENCE
        try:
            super().check(rank, world)
        except RuntimeError as error:
            late = "what another GPU writes into this one's memory does not come"
            raise RuntimeError(late if int(self._failed) else str(error)) from error
        self._patience = 0

    def summed(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum of x over all ranks, plus residual, rounded once."""
        assert self._ranks is not None
        if residual is None or _fits(residual, x):
            return binding.launch(self._ranks, x, residual, patience=self._patience)
        return residual + binding.launch(self._ranks, x, patience=self._patience)


def _fits(residual: Tensor, x: Tensor) -> bool:
    """Whether the kernel can add it."""
    alike = residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
    return alike and residual.data_ptr() % ALIGNED == 0
