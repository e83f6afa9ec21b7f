"""The one-shot all-reduce: every rank gets all parts through the GPUs' peer memory and adds them up, in one launch.

For small messages it takes a fraction of NCCL's time. It needs torch's symmetric memory (peer access between the GPUs;
NVLink multicast is not used). Two kernels do it: our own, which writes into the others' memory (`PUSH`,
push_memory.py), and torch's, which reads it (`ONE_SHOT`). The environment variable of `ASKED` names one, or NCCL.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import PatchError

ASKED, NCCL, ONE_SHOT, PUSH = "ACCELPATCH_ALL_REDUCE", "nccl", "one_shot", "push"
WAYS = (NCCL, ONE_SHOT, PUSH)
MOST = 256 << 10  # bytes of a message: above, every rank's reading of all parts takes longer than NCCL's ring
ALIGNED = 16  # bytes that the kernel reads at once


class PeerMemory:
    """One buffer on each GPU that all of them can read, and sums by torch's kernel. group: the ranks' process group.

    It is made in steps, after each of which the ranks agree that all of them could. way: its name for `ASKED`.
    """

    way = ONE_SHOT
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

    def __init__(self, device: torch.device | None, group: Any):
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        self._symmetric, self._group = symmetric, group
        self._bytes = symmetric.empty(self._size(), dtype=torch.uint8, device=device)

    def _size(self) -> int:
        """Bytes of the buffer. Raises RuntimeError for a group that this way is not for."""
        return MOST

    def share(self) -> None:
        """Let the other ranks read this one's buffer, and find theirs. Raises RuntimeError where that cannot be."""
        self._symmetric.rendezvous(self._bytes, self._group)

    def check(self, rank: int, world: int) -> None:
        """Raise RuntimeError where a sum is wrong."""
        for dtype in self.dtypes:
            for size in (64, 4096, MOST // dtype.itemsize):
                x = torch.full((size,), float(rank + 1), dtype=dtype, device=self._bytes.device)
                for residual in (None, torch.ones_like(x)):
                    due = world * (world + 1) // 2 + (residual is not None)
                    if not bool((self.summed(x, residual) == due).all()):
                        raise RuntimeError("a sum through peer memory was wrong")

    def takes(self, x: Tensor) -> bool:
        """Whether a message goes this way."""
        aligned = x.nbytes % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0
        return x.dtype in self.dtypes and 0 < x.nbytes <= MOST and aligned and x.is_cuda

    def summed(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum of x over all ranks, plus residual. The kernel copies x into the buffer, waits for all ranks before
        it reads, and again before it ends, so that the buffer is free for the next message."""
        buffer = self._bytes[: x.nbytes].view(x.dtype)
        made: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.view(-1), "sum", self._group.group_name)
        return made.view_as(x) if residual is None else residual + made.view_as(x)


def to_try(asked: str, device: torch.device | None) -> tuple[str, ...]:
    """The ways over peer memory to try in turn for what `ASKED` says; NCCL or RCCL serves where there are none.

    Where nothing is asked for: both on NVIDIA's GPUs, the faster one first. On AMD's, where nobody has run them, none.
    Raises PatchError for an unknown way, and for one that is asked for without GPUs.
    """
    if asked not in ("", *WAYS):
        raise PatchError(f"{ASKED} is {asked!r}; it is {', '.join(WAYS[:-1])} or {WAYS[-1]}")
    if asked == NCCL or (asked == "" and (device is None or torch.version.hip is not None)):
        return ()
    if device is None:
        raise PatchError(f"{ASKED}={asked} needs GPUs, and this job computes on the CPU: unset it")
    return (asked,) if asked else (PUSH, ONE_SHOT)
