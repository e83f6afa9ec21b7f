"""Checks of an operation's arguments, for operations and weight layouts alike."""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import E4M3, E8M0

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


def require(holds: bool, op: str, message: str) -> None:
    """Raise KernelError(message) unless `holds`."""
    if not holds:
        raise KernelError(f"{op}: {message}")


def say(tensor: Tensor) -> str:
    """dtype and shape of a tensor, for error messages."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_scale(op: str, n: int, k: int, scale: Tensor, offset: Tensor | None = None) -> int:
    """The group size of a weight[n, k] with this scale. An offset has the scale's shape; with scales in e4m3 it is a
    factor for each row. Raises KernelError where the shapes do not fit."""
    fits = scale.dim() == 2 and scale.shape[0] == n and scale.dtype in (*FLOATS, E8M0, E4M3)
    require(fits, op, f"scale is float [N, G] with N = {n}, not {say(scale)}")
    groups = scale.shape[1]
    require(groups >= 1 and k % groups == 0, op, f"{groups} groups do not divide K = {k} evenly")
    if offset is not None:
        due = [n, 1] if scale.dtype == E4M3 else list(scale.shape)
        require(list(offset.shape) == due, op, f"offset is {due} here, not {say(offset)}")
    return k // groups
