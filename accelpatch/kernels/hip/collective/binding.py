"""ctypes binding of the one-shot all-reduce (push_all_reduce.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.hip.binding import check, stream_of
from accelpatch.kernels.triton.launch import on_device

NAME = "push_all_reduce"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # numbered as in the C interface
MOST_RANKS, SLOTS = 8, 3
VECTOR, VECTORS, MOST_BLOCKS = 16, 128, 128  # bytes of a thread's vector; vectors of a block; blocks of a launch
MOST_BYTES = VECTOR * VECTORS * MOST_BLOCKS  # of a message


class PushArgs(ctypes.Structure):
    """Mirror of ``PushArgs`` in push_all_reduce.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p * MOST_RANKS), ("slot_numbers", ctypes.c_void_p), ("failed", ctypes.c_void_p),
        ("x", ctypes.c_void_p), ("residual", ctypes.c_void_p), ("y", ctypes.c_void_p), ("vectors", ctypes.c_int64),
        ("rank", ctypes.c_int32), ("world", ctypes.c_int32), ("patience", ctypes.c_int32),
    )  # fmt: skip


def memory_bytes(world: int) -> int:
    """Bytes of the memory of each rank that the others write to; all 0xff before the first launch."""
    return SLOTS * world * MOST_BYTES


@dataclass(frozen=True, eq=False)
class Ranks:
    """What a rank's launches have in common.

    memory: addresses of the memory of all ranks, `memory_bytes` each, in the order of the ranks. slot_numbers:
    int32[MOST_BLOCKS], zeros before the first launch. failed: int32[1], zero before the first launch. Both are this
    rank's own.
    """

    rank: int
    memory: Sequence[int]
    slot_numbers: Tensor
    failed: Tensor

    def arguments(self, x: Tensor, residual: Tensor | None, y: Tensor, patience: int) -> PushArgs:
        """The arguments of a launch; tensors and patience as in `launch`."""
        return PushArgs(
            (ctypes.c_void_p * MOST_RANKS)(*self.memory), self.slot_numbers.data_ptr(), self.failed.data_ptr(),
            x.data_ptr(), None if residual is None else residual.data_ptr(), y.data_ptr(), x.nbytes // VECTOR,
            self.rank, len(self.memory), patience,
        )  # fmt: skip


def declared(library: ctypes.CDLL) -> Any:
    """``accelpatch_push_all_reduce(args, dtype, stream) -> status`` of a library, with its C types declared."""
    entry = library.accelpatch_push_all_reduce
    entry.argtypes, entry.restype = [ctypes.POINTER(PushArgs), ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    return entry


def launch(ranks: Ranks, x: Tensor, residual: Tensor | None = None, *, patience: int = 0) -> Tensor:
    """y = sum over ranks of x, plus residual, on torch's current stream. All ranks make the same launches in one order.

    x and residual: contiguous, of a dtype in DTYPES, of the same shape, of at most MOST_BYTES, a multiple of VECTOR
    bytes. patience: how often a thread loads the values of the other ranks before it sets `failed` and y is
    unspecified; 0: until they have arrived. Raises KernelError for a refused launch.
    """
    y = torch.empty_like(x)
    with on_device(x):
        args = ranks.arguments(x, residual, y, patience)
        check(_entry(x.device)(ctypes.byref(args), DTYPES.index(x.dtype), stream_of(x)), NAME)
    return y


@cache
def _entry(device: torch.device) -> Any:
    return declared(libraries.library(NAME, probe(device)))
