"""The one-shot all-reduce: every rank reads all parts out of the other GPUs' memory and adds them up, in one launch.

For small messages it takes a fraction of NCCL's time. It needs torch's symmetric memory (peer access between the GPUs;
NVLink multicast is not used), and only runs where the environment variable of `ASKED` asks for it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import PatchError

ASKED, ONE_SHOT = "ACCELPATCH_ALL_REDUCE", "one_shot"
MOST = 256 << 10  # bytes of a message: above, every rank's reading of all parts takes longer than NCCL's ring
ALIGNED = 16  # bytes that the kernel reads at once
DTYPES = (torch.bfloat16, torch.float32)


class PeerMemory:
    """One buffer on each GPU that all of them can read. group: the name of the ranks' process group."""

    def __init__(self, buffer: Tensor, group: str):
        self._bytes, self._group = buffer, group

    def takes(self, x: Tensor) -> bool:
        """Whether a message goes this way."""
        return x.dtype in DTYPES and x.nbytes <= MOST and x.nbytes % ALIGNED == 0 and x.is_cuda

    def summed(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks. The kernel waits for all ranks before it reads and before it ends, so that the
        buffer is free for the next message."""
        held = self._bytes[: x.nbytes].view(x.dtype)
        held.copy_(x.view(-1))
        made: Tensor = torch.ops.symm_mem.one_shot_all_reduce(held, "sum", self._group)
        return made.view_as(x)


def asked_for(device: torch.device | None, group: Any, rank: int, world: int) -> PeerMemory | None:
    """The way through peer memory, where the environment asks for it. Raises PatchError where it cannot run here."""
    wanted = os.environ.get(ASKED, "")
    if wanted not in ("", "nccl", ONE_SHOT):
        raise PatchError(f"{ASKED} is {wanted!r}; it is nccl or {ONE_SHOT}")
    if wanted != ONE_SHOT:
        return None
    if device is None:
        raise PatchError(f"{ASKED}={ONE_SHOT} needs GPUs, and this job computes on the CPU: unset it")
    try:
        return _checked(device, str(group.group_name), rank, world)
    except (ImportError, AttributeError, RuntimeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise PatchError(f"{ASKED}={ONE_SHOT} cannot run here ({said}): unset it, and NCCL takes its place") from error


def _checked(device: torch.device, group: str, rank: int, world: int) -> PeerMemory:
    """The buffers, once a sum through them was right."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(MOST, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, group)  # type: ignore[arg-type]
    made = PeerMemory(buffer, group)
    for _ in range(3):
        found = made.summed(torch.full((4096,), float(rank + 1), dtype=torch.bfloat16, device=device))
        if not bool((found == world * (world + 1) // 2).all()):
            raise RuntimeError("a sum through peer memory was wrong")
    return made
