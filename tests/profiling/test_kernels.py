"""Resources and counts of compiled kernels: what Triton made for two archs, and what our own compile to."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from accelpatch.device import KNOWN
from accelpatch.errors import AccelpatchError, KernelError
from accelpatch.kernels.compiling.occupancy import Resources
from accelpatch.profiling import code_objects, isa, limits, own_kernels
from tests.cli.conftest import Cli, cli  # noqa: F401
from tests.support import amd_toolchain

FIXTURES = Path(__file__).parent.parent / "fixtures/profiling"
GFX942, SM90 = FIXTURES / "triton-gfx942", FIXTURES / "triton-sm90"
OBJDUMP = next((one for one in code_objects.OBJDUMPS[:-1] if shutil.which(one)), None)


@pytest.fixture
def cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints what cuobjdump printed of the fixture."""
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in -sass) cat {SM90}/sass.txt;; --dump-resource-usage) cat {SM90}/resources.txt;; esac\n'
    )
    tool.chmod(0o700)
    monkeypatch.setattr(code_objects, "cuobjdump", lambda: str(tool))


def test_a_cache_of_triton_for_amd() -> None:
    """Assembly goes before the code object beside it; shared memory and warps are those of the launch."""
    (found,), left = code_objects.read(GFX942)
    assert left == []
    assert (found.file, found.arch, found.used.kernel) == ("dot_kernel.amdgcn", "gfx942", "dot_kernel")
    assert (found.used.registers, found.scalars, found.accumulators) == (108, 20, 0)
    assert (found.used.shared, found.used.threads) == (4096, 256)
    assert found.counts is not None
    text = (GFX942 / "dot_kernel.amdgcn").read_text()
    assert found.counts.matrix == text.count("\tv_mfma_") == 4
    assert found.counts.waits == text.count("\ts_waitcnt") == 20
    assert found.counts.loads == text.count("\tglobal_load_") == 16
    assert found.counts.wide_loads == 0
    assert (found.counts.shared_reads, found.counts.shared_writes, found.counts.barriers) == (20, 12, 4)
    assert found.trips == 2  # one operand by local_alloc and local_load, the other by convert_layout
    assert found.occupancy is not None
    assert (found.occupancy.waves, found.occupancy.limit, found.occupancy.next) == (4, "registers", (96, 5))


@pytest.mark.skipif(OBJDUMP is None, reason="needs llvm-objdump 19 or newer")
def test_a_code_object_is_as_its_assembly() -> None:
    (assembly,), (made,) = (code_objects.of_file(GFX942 / f"dot_kernel.{one}") for one in ("amdgcn", "hsaco"))
    assert made.used == assembly.used
    assert made.counts == assembly.counts
    assert made.notes == ()


def test_a_code_object_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_objects, "OBJDUMPS", ())
    (found,) = code_objects.of_file(GFX942 / "dot_kernel.hsaco")
    assert (found.used.registers, found.counts) == (108, None)
    assert "no llvm-objdump" in found.notes[0]


@pytest.mark.usefixtures("cuobjdump")
def test_a_cache_of_triton_for_nvidia() -> None:
    (found,), _ = code_objects.read(SM90)
    assert (found.arch, found.used.registers, found.used.shared, found.used.threads) == ("sm_90", 128, 8192, 128)
    assert found.counts is not None
    sass = (SM90 / "sass.txt").read_text()
    assert found.counts.matrix == sass.count(" HGMMA.") == 2
    assert found.counts.loads == sass.count(" LDG.") == 32
    assert found.trips == 1
    assert found.notes == ()


@pytest.mark.usefixtures("cuobjdump")
def test_a_cubin_alone_has_no_size_of_a_block(tmp_path: Path) -> None:
    shutil.copy(SM90 / "dot_kernel.cubin", tmp_path)
    (found,) = code_objects.of_file(tmp_path / "dot_kernel.cubin")
    assert found.notes == (code_objects.NO_SIZE,)
    assert found.used.shared == 1024


def test_a_cubin_without_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_objects, "cuobjdump", lambda: None)
    with pytest.raises(AccelpatchError, match="pip install triton"):
        code_objects.of_file(SM90 / "dot_kernel.cubin")


IR = """
%1 = ttg.local_alloc %0 : (tensor<64x32xf16, #blocked>) -> !ttg.memdesc<64x32xf16, #shared, #smem>
%2 = ttg.local_load %1 : !ttg.memdesc<64x32xf16, #shared, #smem> -> tensor<64x32xf16, #mma>
%3 = triton_gpu.convert_layout %2 : (tensor<64x32xf16, #shared1>) -> tensor<64x32xf16, #mma>
%4 = triton_gpu.convert_layout %3 : (tensor<64x32xf16, #blocked>) -> tensor<64x32xf16, #shared1>
%5 = ttg.convert_layout %4 : tensor<64x32xf16, #blocked> -> tensor<64x32xf16, #linear>
%6 = ttg.convert_layout %5 : tensor<64x32xf16, #blocked> -> tensor<64x32xf16, #blocked>
"""


def test_trips_through_shared_memory() -> None:
    """A load, a read by the older dialect, and a conversion; a write alone and a conversion to the same are none."""
    assert isa.trips_through_shared(IR) == 3


def test_counts_of_instructions() -> None:
    body = "k:\n\tglobal_load_dwordx4 v[0:3], v0\n\tglobal_load_dword v4\n\ts_waitcnt vmcnt(0) lgkmcnt(0)\n\ts_endpgm\n"
    body += ".LBB0_1:\n\tv_dot4c_i32_i8 v1, v2, v3\n\tscratch_store_dword v1\n\ts_barrier\n"
    (counts,) = isa.of_amd(body).values()
    assert (counts.loads, counts.wide_loads, counts.waits, counts.full_waits) == (2, 1, 1, 1)
    assert (counts.dots, counts.spills, counts.barriers) == (1, 1, 1)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_the_table_of_the_guide(arch: str) -> None:
    """Table 1 of "Compute the occupancy of the kernel": 512 registers, in units of 8, and 8 waves at most."""
    assert limits.steps(arch) == [(64, 8), (72, 7), (80, 6), (96, 5), (128, 4), (168, 3), (256, 2), (512, 1)]


@pytest.mark.parametrize(
    "arch, registers, threads, shared, waves, limit, one_less, more",
    [
        pytest.param("gfx942", 169, 64, 0, 2, "registers", 3, (168, 3), id="one register less gives a wave"),
        pytest.param("gfx942", 168, 64, 0, 3, "registers", 3, (128, 4), id="at the step"),
        pytest.param("gfx942", 64, 256, 32768, 2, "shared memory", 2, None, id="LDS"),
        pytest.param("gfx942", 64, 256, 0, 8, "nothing", 8, None, id="full"),
        pytest.param("gfx950", 64, 256, 32768, 5, "shared memory", 5, None, id="a CU of 160 KiB"),
        pytest.param("sm_90", 91, 256, 0, 4, "registers", 4, (80, 6), id="warps"),
        pytest.param("gfx942", 32, 768, 0, 6, "the size of a block", 6, None, id="12 waves, two of them fit"),
        pytest.param("gfx942", 128, 256, 32768, 2, "shared memory", 2, None, id="LDS before registers"),
    ],
)
def test_what_limits(
    arch: str, registers: int, threads: int, shared: int, waves: int, limit: str, one_less: int,
    more: tuple[int, int] | None,
) -> None:  # fmt: skip
    found = limits.occupancy(arch, Resources("k", registers, 0, 0, 0, shared, threads))
    assert (found.waves, found.limit, found.one_less, found.next) == (waves, limit, one_less, more)


def test_archs_that_are_not_known(tmp_path: Path) -> None:
    text = (GFX942 / "dot_kernel.amdgcn").read_text().replace("gfx942", "gfx1234")
    (tmp_path / "k.s").write_text(text)
    (found,) = code_objects.of_file(tmp_path / "k.s")
    assert (found.arch, found.used.registers, found.occupancy) == ("gfx1234", 108, None)
    assert "the occupancy of gfx1234 is not known" in found.notes[0]
    with pytest.raises(KernelError, match="gfx1234"):
        limits.steps("gfx1234")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.98])
@pytest.mark.parametrize("name", ["dot_kernel.hsaco", "dot_kernel.amdgcn"])
def test_files_that_are_cut_off(name: str, part: float, tmp_path: Path) -> None:
    data = (GFX942 / name).read_bytes()
    end = data.index(b"amdhsa.kernels") + 200 if part == 0.98 else int(len(data) * part)
    (tmp_path / name).write_bytes(data[:end])
    with pytest.raises(AccelpatchError, match=f"{name} is no .*, or it is cut off"):
        code_objects.of_file(tmp_path / name)


def test_a_folder_with_damaged_files_is_read_on(tmp_path: Path, cli: Cli) -> None:  # noqa: F811
    shutil.copytree(GFX942, tmp_path / "good")
    (tmp_path / "bad.co").write_bytes(b"\x7fELF what")
    (tmp_path / "bundle.co").write_bytes(b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", 1 << 40))
    done = cli("profile", "kernels", str(tmp_path))
    assert done.exit_code == 0
    assert "dot_kernel  gfx942  108" in done.stdout
    assert "left out: " + str(tmp_path / "bad.co") in done.stderr
    assert "left out: " + str(tmp_path / "bundle.co") in done.stderr


def test_hostile_names(tmp_path: Path, cli: Cli) -> None:  # noqa: F811
    text = (GFX942 / "dot_kernel.amdgcn").read_text().replace(".name:           dot_kernel", ".name: \x1b[2J$(touch x)")
    path = tmp_path / "-rf; touch owned.s"
    path.write_text(text)
    done = cli("profile", "kernels", str(path))
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "?[2J$(touch x)" in done.stdout
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_what_is_no_kernel(tmp_path: Path, cli: Cli) -> None:  # noqa: F811
    (tmp_path / "a.txt").write_text("x")
    assert "is no compiled kernel" in cli("profile", "kernels", str(tmp_path / "a.txt")).stderr
    assert "holds no compiled kernels" in cli("profile", "kernels", str(tmp_path)).stderr
    assert "cannot be read" in cli("profile", "kernels", str(tmp_path / "none.s")).stderr
    assert "name files of compiled kernels" in cli("profile", "kernels").stderr
    assert cli("profile", "kernels", "x.s", "--arch", "gfx942").exit_code == 2
    assert "no library 'none'" in cli("profile", "kernels", "--arch", "gfx942", "--library", "none").stderr


def test_json_and_the_table(cli: Cli) -> None:  # noqa: F811
    found = json.loads(cli("profile", "kernels", str(GFX942), "--json").stdout)
    assert found["kernels"][0]["counts"]["matrix"] == 4
    assert found["kernels"][0]["occupancy"]["next"] == [96, 5]
    assert "168              3" in cli("profile", "kernels", "--table", "gfx942").stdout


@pytest.mark.slow
@amd_toolchain.needs_amd_clang
def test_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPCC", str(amd_toolchain.hipcc(tmp_path / "rocm")))
    (found,) = own_kernels.own(KNOWN["gfx942"], "read_limit")
    assert "read_all" in found.used.kernel
    assert found.counts is not None
    assert found.counts.wide_loads > 0
    assert found.used.vector_spills == found.counts.spills == 0
    assert found.occupancy is not None
    assert found.occupancy.waves > 0
