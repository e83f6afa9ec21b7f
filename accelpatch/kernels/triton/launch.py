"""What the Triton kernels of this package have in common: where they can run, and on which device they are launched."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe

NARROW = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None


def why_not(device: Device, *dtypes: torch.dtype) -> str | None:
    """Why no kernel here runs on `device` with floats of these dtypes, or None."""
    if device.kind != "cuda":
        return "Triton kernels run on GPUs"
    if not _installed():
        return "Triton is not installed"
    wide = [dtype for dtype in dtypes if dtype not in NARROW]
    return f"no Triton kernel for {wide[0]}" if wide else None


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches within it go to the tensor's device."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own is one of its functions, and takes microseconds on the host."""
    return -(-a // b)


def warps(block: int) -> int:
    """Warps for one row of `block` elements."""
    return min(16, max(1, block // 512))


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; the interpreter, which runs one program after the other, is taken for a small one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def dependent(tensor: Tensor) -> tuple[bool, dict[str, Any]]:
    """Whether kernels may begin before the one before them ends, and the launch's options for it."""
    return _dependent(tensor.device)


@functools.cache
def _dependent(device: torch.device) -> tuple[bool, dict[str, Any]]:
    arch = probe(device).arch if device.type == "cuda" else ""
    new = arch.startswith("sm_") and int(arch[3:].rstrip("a")) >= 90
    return (True, {"launch_pdl": True}) if new and _available() else (False, {})


@functools.cache
def _available() -> bool:
    from accelpatch.kernels.triton import overlapped

    return overlapped.HERE
