"""Measured memory read bandwidth: the upper bound for a decode step, which reads every weight once.

torch sums a float32 buffer that is larger than all caches, with the model's number of threads. On the CPUs tried, that
is as fast as the fastest hand-written read (on a 2-core Zen 5 within 5% of libc's ``memchr`` in threads). On a GPU with
the device library, its stream kernel reads instead, which was up to 6% faster than the sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.bench.timing import between_events, measure
from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries

FLOOR = 1 << 29  # bytes: more than any last-level cache of a GPU (MI300X: 256 MiB)
REPEATS = 7
GRIDS = (2, 4, 16)  # blocks of the stream kernel for each SM (AMD: CU); which is fastest differs


@dataclass(frozen=True)
class ReadLimit:
    """bytes_per_second: the fastest of the repeats."""

    bytes_per_second: float
    buffer_bytes: int
    threads: int
    method: str


def read_limit(device: torch.device) -> ReadLimit:
    """Measure the read bandwidth of ``device``; takes well under a second, besides filling the buffer."""
    if device.type == "cuda" and libraries.why_not("read_limit", probe(device)) is None:
        return _by_stream_kernel(torch.ones(8 * FLOOR, dtype=torch.uint8, device=device))
    size = max(FLOOR, 8 * last_level_cache()) if device.type == "cpu" else 4 * FLOOR
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    taken = measure(buffer.sum, device=device, repeats=REPEATS, warmup=2)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return ReadLimit(size / min(taken.seconds), size, threads, "torch sum of a float32 buffer, fastest of 7")


def _by_stream_kernel(buffer: Tensor) -> ReadLimit:
    launches = stream_reads(libraries.library("read_limit", probe(buffer.device)), buffer)
    with torch.cuda.device(buffer.device):
        stream = torch.cuda.current_stream().cuda_stream
        times = [between_events(partial(read, stream)) for read in launches for _ in range(REPEATS)]
    return ReadLimit(buffer.nbytes / min(times), buffer.nbytes, 0, f"stream kernel, fastest of {len(times)}")


def stream_reads(library: ctypes.CDLL, buffer: Tensor) -> list[Callable[[int], Any]]:
    """Launches of the library's stream kernel over all of ``buffer``, one for each of GRIDS; each takes a stream."""
    read = library.accelpatch_read_all
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    sink = torch.zeros(4, device=buffer.device)
    units = torch.cuda.get_device_properties(buffer.device).multi_processor_count

    def of(blocks: int) -> Callable[[int], Any]:
        return lambda stream: read(buffer.data_ptr(), buffer.nbytes, sink.data_ptr(), blocks, stream)

    return [of(blocks * units) for blocks in GRIDS]


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the first CPU's largest cache; 0 where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [file.read_text().strip() for file in folder.glob("index*/size")]
    return max((int(text[:-1]) * units[text[-1]] for text in sizes if text and text[-1] in units), default=0)
