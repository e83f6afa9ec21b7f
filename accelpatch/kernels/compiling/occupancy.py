"""Occupancy: how many waves (warps) of a kernel fit a compute unit (SM), from the resources of one.

AMD (CDNA 2 to 4): a SIMD has 512 vector registers per lane, allocated in units of 8, and room for 8 waves; a compute
unit has four SIMDs and its LDS. With nW waves per workgroup, a SIMD holds min(floor(4 * waves by registers / nW),
floor(LDS / LDS per workgroup)) * nW / 4. Source: "Compute the occupancy of the kernel" in ROCm's guide to tuning Triton
kernels. NVIDIA: 65,536 registers per SM, allocated to a warp in units of 256; each block takes 1 KiB of shared memory
more than it asks for. Source: the CUDA programming guide's table of compute capabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.device import ARCHS, KIB
from accelpatch.errors import KernelError


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, as the compiler reports them.

    registers: vector registers per lane. vector_spills, scalar_spills: spilled registers. scratch: bytes per lane.
    shared: static bytes per block (dynamic ones of a launch not included). threads: the most per block.
    """

    kernel: str
    registers: int
    vector_spills: int
    scalar_spills: int
    scratch: int
    shared: int
    threads: int


def waves(arch: str, used: Resources, shared: int | None = None) -> int:
    """Waves per SIMD (NVIDIA: warps per scheduler). shared: bytes per block in place of the static ones.

    0 where not even one block fits. Raises KernelError for an arch whose registers are not known here.
    """
    unit = ARCHS.get(arch)
    if unit is None or (unit.vendor == "amd" and unit.matrix != "mfma"):
        raise KernelError(f"the occupancy of {arch} is not known: it is for CDNA 2 to 4 and NVIDIA GPUs")
    block = max(1, -(-used.threads // unit.wave_size))
    room = used.shared if shared is None else shared
    if unit.vendor == "amd":
        by_registers = min(8, 512 // max(8, _up(used.registers, 8))) * unit.schedulers
    else:
        each = _up(max(1, used.registers) * unit.wave_size, 256)
        by_registers = min(unit.waves, 65536 // each)
        room += KIB
    blocks = min(by_registers // block, unit.shared // room if room else by_registers)
    return blocks * block // unit.schedulers


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
