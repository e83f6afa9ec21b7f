"""Shared by the Triton kernels: where they can run, and how they are launched."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels.triton.compile_guard import guarded

NARROW = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None


def why_not(device: Device, *dtypes: torch.dtype) -> str | None:
    """Why no Triton kernel can run on `device` with floats of these dtypes; None where they can."""
    if device.kind != "cuda":
        return "Triton kernels run on GPUs"
    if not _installed():
        return "Triton is not installed"
    wide = [dtype for dtype in dtypes if dtype not in NARROW]
    return f"no Triton kernel for {wide[0]}" if wide else None


def no_wgmma(device: Device) -> str | None:
    """Why a kernel for Hopper's matrix unit cannot run on `device`; None where it can."""
    matrix = None if device.facts is None else device.facts.matrix
    return None if matrix == "wgmma" else f"it is for Hopper's matrix unit, which {device.arch} has not"


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Context manager: Triton launches go to the tensor's device. On AMD an aborting compiler is a CompileError."""
    place = on_device(tensor)
    return guarded(place) if torch.version.hip and tensor.is_cuda else place


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Context manager: other launches go to the tensor's device."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b). Triton's own version costs microseconds on the host."""
    return -(-a // b)


def warps(block: int) -> int:
    """Number of warps for one row of `block` elements."""
    return min(16, max(1, block // 512))


@functools.cache
def processors(device: torch.device) -> int:
    """Number of SMs (AMD: CUs); for the interpreter, which runs programs serially, a small number."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


@functools.cache
def _rounds_to_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def rounds_to_e4m3(tensor: Tensor) -> bool:
    """Whether the tensor's device rounds float32 to OCP's e4m3 in one instruction, ties to even and saturated."""
    return _rounds_to_e4m3(tensor.device)


def dependent(tensor: Tensor) -> tuple[bool, dict[str, Any]]:
    """Whether kernels may use programmatic dependent launch, and the launch options for it."""
    return _dependent(tensor.device)


@functools.cache
def _dependent(device: torch.device) -> tuple[bool, dict[str, Any]]:
    facts = probe(device).facts
    overlap = facts is not None and facts.dependent_launch and _available()
    return (True, {"launch_pdl": True}) if overlap else (False, {})


@functools.cache
def _available() -> bool:
    from accelpatch.kernels.triton import dependent_launch

    return dependent_launch.HERE
