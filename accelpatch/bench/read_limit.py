"""How fast this machine can read memory at all: the limit of a decode step, which reads every weight once.

One method on all devices: torch sums a float32 buffer that no cache can hold, with the threads that the model gets.
A sum is a pure read, and on the CPUs and GPUs tried it is as fast as the fastest read that could be written by hand
(on a 2-core Zen 5 within 5% of libc's ``memchr`` in threads).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from accelpatch.bench.timing import measure

FLOOR = 1 << 29  # bytes: more than any last-level cache of a GPU (MI300X: 256 MiB)
REPEATS = 7


@dataclass(frozen=True)
class ReadLimit:
    """bytes_per_second is the fastest of the repeats: a limit is what was reached at least once."""

    bytes_per_second: float
    buffer_bytes: int
    threads: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def read_limit(device: torch.device) -> ReadLimit:
    """Measure it on ``device``; takes well under a second beside the making of the buffer."""
    size = max(FLOOR, 8 * last_level_cache()) if device.type == "cpu" else 4 * FLOOR
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    taken = measure(buffer.sum, device=device, repeats=REPEATS, warmup=2)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return ReadLimit(size / min(taken.seconds), size, threads, "torch sum of a float32 buffer, fastest of 7")


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache of the first CPU; 0 where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [file.read_text().strip() for file in folder.glob("index*/size")]
    return max((int(text[:-1]) * units[text[-1]] for text in sizes if text and text[-1] in units), default=0)
