"""Occupancy by hand-computed cases, and what is read of the compilers' words."""

from __future__ import annotations

import pytest

from accelpatch.device import KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import occupancy, resources
from accelpatch.kernels.compiling.occupancy import Resources
from accelpatch.kernels.compiling.targets import unknown_arch


def taken(registers: int, threads: int, shared: int = 0) -> Resources:
    return Resources("k", registers, 0, 0, 0, shared, threads)


@pytest.mark.parametrize(
    "arch, kernel, waves",
    [
        ("gfx90a", taken(64, 256), 8),  # 512 / 64 = 8 waves a SIMD, 32 a unit, 8 workgroups of 4
        ("gfx90a", taken(65, 256), 7),  # 72 registers: 7 waves, 28 a unit, 7 workgroups
        ("gfx942", taken(168, 512), 2),  # 3 waves a SIMD, 12 a unit, one workgroup of 8
        ("gfx942", taken(128, 512), 4),
        ("gfx942", taken(64, 256, shared=24672), 2),  # two workgroups by LDS
        ("gfx950", taken(64, 256, shared=24672), 6),  # 163840 / 24672 = 6
        ("gfx942", taken(64, 256, shared=70000), 0),
        ("sm_90", taken(91, 256), 4),  # 96 a thread: 21 warps, two blocks of 8
        ("sm_90", taken(32, 256), 16),
        ("sm_89", taken(32, 256), 12),
        ("sm_90", taken(32, 256, shared=100 * 1024), 4),  # 101 KiB of 228: two blocks
    ],
)
def test_waves(arch: str, kernel: Resources, waves: int) -> None:
    assert occupancy.waves(arch, kernel) == waves


def test_room_asked_for_at_launch_counts_instead() -> None:
    assert occupancy.waves("gfx942", taken(64, 256), shared=32768) == 2


@pytest.mark.parametrize("arch", [arch for arch, device in KNOWN.items() if unknown_arch(device) is None])
def test_every_gpu_that_kernels_are_built_for_holds_a_small_one(arch: str) -> None:
    assert occupancy.waves(arch, taken(32, 256)) > 0


@pytest.mark.parametrize("arch", ["gfx1100", "gfx906", "sm_70"])
def test_gpus_whose_registers_are_not_known(arch: str) -> None:
    with pytest.raises(KernelError, match=f"occupancy of {arch} is not known"):
        occupancy.waves(arch, taken(32, 256))


ASSEMBLY = """_Z1kv:
\ts_endpgm
amdhsa.kernels:
  - .agpr_count:     4
    .group_segment_fixed_size: 128
    .max_flat_workgroup_size: 512
    .name:           _Z1kv
    .private_segment_fixed_size: 8
    .sgpr_spill_count: 80
    .vgpr_count:     146
    .vgpr_spill_count: 2
"""
PTXAS = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90'
ptxas info    : Function properties for _Z1kv
    16 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 91 registers, used 16 barriers, 16 bytes cumulative stack size, 384 bytes smem
"""
PTX = ".visible .entry _Z1kv(\n.param .u64 a\n)\n.maxntid 256, 1, 1\n{\n}\n"


def test_amd_assembly() -> None:
    assert resources.of_assembly(ASSEMBLY) == {"_Z1kv": Resources("_Z1kv", 146, 2, 80, 8, 128, 512)}


def test_nvidia_words() -> None:
    assert resources.of_ptxas(PTXAS, PTX) == {"_Z1kv": Resources("_Z1kv", 91, 3, 0, 16, 384, 256)}


def test_words_that_cannot_be_read() -> None:
    with pytest.raises(KernelError, match="cannot read"):
        resources.of_ptxas(PTXAS.replace("registers", "things"), PTX)
