"""How many waves of a kernel a processor holds at once, from what one wave takes.

AMD (CDNA 2 to 4): a SIMD has 512 vector registers a lane, dealt in eights, and room for 8 waves; a compute unit has
four SIMDs and its LDS. With nW waves a workgroup, a SIMD holds as many as
min(floor(4 * waves by registers / nW), floor(LDS / LDS a workgroup)) * nW / 4.
Source: "Compute the occupancy of the kernel" in ROCm's guide to tuning Triton kernels.
NVIDIA: 65,536 registers a multiprocessor, dealt to a warp by 256; of shared memory each block takes 1 KiB more than it
asks for. Source: the CUDA programming guide's table of compute capabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class ComputeUnit:
    """A compute unit or multiprocessor. waves: it holds at most; schedulers: SIMDs; shared: bytes for all blocks."""

    waves: int
    schedulers: int
    shared: int
    wave_size: int


_CDNA = ComputeUnit(32, 4, 64 * KIB, 64)
COMPUTE_UNITS: Mapping[str, ComputeUnit] = {
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": ComputeUnit(32, 4, 160 * KIB, 64),
    "sm_80": ComputeUnit(64, 4, 164 * KIB, 32),
    "sm_89": ComputeUnit(48, 4, 100 * KIB, 32),
    "sm_90": ComputeUnit(64, 4, 228 * KIB, 32),
    "sm_100": ComputeUnit(64, 4, 228 * KIB, 32),
    "sm_120": ComputeUnit(48, 4, 100 * KIB, 32),
}


@dataclass(frozen=True)
class Resources:
    """What the compiler says that one kernel takes.

    registers: vector registers a lane. vector_spills, scalar_spills: registers. scratch: bytes a lane. shared: bytes a
    block fixed at compile time (what a launch adds is not in it). threads: the most a block has.
    """

    kernel: str
    registers: int
    vector_spills: int
    scalar_spills: int
    scratch: int
    shared: int
    threads: int


def waves(arch: str, used: Resources, shared: int | None = None) -> int:
    """Waves that a SIMD (NVIDIA: a scheduler) holds; `shared`: bytes a block in place of those fixed at compile time.

    0: a block does not fit at all. KeyError for an arch that PROCESSORS has not got.
    """
    unit = COMPUTE_UNITS[arch]
    block = max(1, -(-used.threads // unit.wave_size))
    room = used.shared if shared is None else shared
    if arch.startswith("gfx"):
        by_registers = min(8, 512 // max(8, _up(used.registers, 8))) * unit.schedulers
    else:
        each = _up(max(1, used.registers) * unit.wave_size, 256)
        by_registers = min(unit.waves, 65536 // each)
        room += KIB
    blocks = min(by_registers // block, unit.shared // room if room else by_registers)
    return blocks * block // unit.schedulers


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
