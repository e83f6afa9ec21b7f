"""Whether a GPU has room for what a rank puts there, said before anything is moved."""

from __future__ import annotations

import torch
from torch import nn

from accelpatch.report import human


def why_no_room(model: nn.Module, device: torch.device) -> str | None:
    """Why a model's weights do not fit a GPU; None where they do. What lies there already counts nothing."""
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers()) if one.device != device}
    needed = sum(one.nbytes for one in tensors.values())
    free, total = free_of(device)
    if needed <= free:
        return None
    return (
        f"{device} has {human(free)} free of {human(total)}, and its part of the model takes {human(needed)}: end what "
        "else runs on that GPU, start more ranks, or leave the GPU out (CUDA_VISIBLE_DEVICES)"
    )


def free_of(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU that this process can still get, and all that it has."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
