"""Hardware descriptions: of this machine's devices (``probe``), and of GPUs that one can plan for (``KNOWN``).

A ``Device`` is plain data, so that plans and tests can use one of any machine.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KIB, GIB = 1024, 1024**3


@dataclass(frozen=True)
class Arch:
    """Facts of a GPU architecture; sizes in bytes. Sources: the CUDA programming guide's table of compute capabilities;
    AMD's ISA guides of CDNA 2 to 4 and RDNA 3.

    wave_size: lanes of a warp or wavefront. waves: the most that an SM or CU holds, on `schedulers` schedulers (SIMDs).
    shared: shared memory (LDS) of an SM or CU; block_shared: the most for one block. clusters: blocks of a cluster read
    each other's shared memory. dependent_launch: a kernel can start while the one before it ends. matrix: the matrix
    unit's instructions. fp8: the form of its 8-bit floats. card, memory, bandwidth (bytes/s): a common card, the
    smallest where there are several; memory as torch reports it, a little under the label's.
    """

    name: str
    vendor: str
    wave_size: int
    waves: int
    schedulers: int
    shared: int
    block_shared: int
    clusters: bool = False
    dependent_launch: bool = False
    matrix: str | None = None
    fp8: str | None = None
    card: str | None = None
    memory: int = 0
    bandwidth: float = 0.0

    @property
    def number(self) -> int:
        """90 for sm_90; NVIDIA only."""
        return int(self.name.removeprefix("sm_"))

    def why_not_fp8(self, form: str) -> str | None:
        """Why it cannot multiply 8-bit floats of a form, "e4m3fn" or "e4m3fnuz", by each other; None where it can."""
        if self.fp8 == form:
            return None
        has = f"its 8-bit floats are {self.fp8}, not {form}" if self.fp8 else "its matrix unit has no 8-bit floats"
        return f"{has} ({self.name})"


def nvidia_arch(number: int) -> str:
    """The arch of a compute capability: "sm_90" of 90."""
    return f"sm_{number}"


def _cdna(name: str, lds: int, fp8: str | None, card: str, gib: float, bandwidth: float) -> Arch:
    return Arch(
        name, "amd", 64, 32, 4, lds * KIB, lds * KIB, matrix="mfma", fp8=fp8, card=card, memory=int(gib * GIB),
        bandwidth=bandwidth,
    )  # fmt: skip


def _sm(
    number: int, waves: int, shared: int, matrix: str, fp8: str | None = None, card: str | None = None,
    gib: float = 0.0, bandwidth: float = 0.0,
) -> Arch:  # fmt: skip
    hopper, block = number >= 90, shared - (number >= 80)  # from Ampere on 1 KiB of each block is the system's
    return Arch(
        nvidia_arch(number), "nvidia", 32, waves, 4, shared * KIB, block * KIB, hopper, hopper, matrix, fp8, card,
        int(gib * GIB), bandwidth,
    )  # fmt: skip


_ARCHS = (
    _cdna("gfx90a", 64, None, "AMD Instinct MI210", 63.98, 1.638e12),  # the MI250X too
    _cdna("gfx942", 64, "e4m3fnuz", "AMD Instinct MI300X", 191.98, 5.3e12),
    _cdna("gfx950", 160, "e4m3fn", "AMD Instinct MI350X", 287.98, 8e12),
    Arch("gfx1100", "amd", 32, 32, 2, 64 * KIB, 64 * KIB, matrix="wmma", card="AMD Radeon RX 7900 XTX",
         memory=int(23.98 * GIB), bandwidth=0.96e12),
    _sm(75, 32, 64, "mma without bf16"),
    _sm(80, 64, 164, "mma", None, "NVIDIA A100-SXM4-80GB", 79.15, 2.039e12),
    _sm(86, 48, 100, "mma", None, "NVIDIA GeForce RTX 3090", 23.69, 0.936e12),
    _sm(87, 48, 164, "mma"),
    _sm(89, 48, 100, "mma", "e4m3fn", "NVIDIA L40S", 44.42, 0.864e12),
    _sm(90, 64, 228, "wgmma", "e4m3fn", "NVIDIA H200", 139.72, 4.8e12),
    _sm(100, 64, 228, "tcgen05", "e4m3fn", "NVIDIA B200", 178.35, 8e12),
    _sm(103, 64, 228, "tcgen05", "e4m3fn"),
    _sm(120, 48, 100, "mma", "e4m3fn", "NVIDIA GeForce RTX 5090", 31.36, 1.792e12),
    _sm(121, 48, 100, "mma", "e4m3fn"),
)  # fmt: skip
ARCHS: Mapping[str, Arch] = MappingProxyType({arch.name: arch for arch in _ARCHS})
CDNA = CDNA2, CDNA3, CDNA4 = ("gfx90a", "gfx942", "gfx950")
AMPERE_TO_HOPPER = tuple(arch.name for arch in _ARCHS if arch.vendor == "nvidia" and 80 <= arch.number <= 90)


@functools.cache
def facts_of(arch: str) -> Arch | None:
    """The facts of a GPU's arch; an NVIDIA arch that is not in ARCHS has those of the nearest older one. Else None."""
    name = arch.rstrip("a") if arch.startswith("sm_") else arch  # sm_90a: the same chip
    if name in ARCHS or not name.removeprefix("sm_").isdigit():
        return ARCHS.get(name)
    older = [one for one in _ARCHS if one.vendor == "nvidia" and one.number < int(name.removeprefix("sm_"))]
    return replace(older[-1], name=name, card=None) if older else None


@dataclass(frozen=True)
class Device:
    """One device. memory: bytes. wave_size: lanes of a warp or wavefront, 1 on a CPU. index: torch's device index,
    None for a CPU or a GPU that is not in this machine."""

    kind: str  # torch's device type: "cpu" or "cuda" (ROCm is "cuda" for torch)
    vendor: str  # "cpu", "amd", "nvidia"
    arch: str  # "x86-64-avx512", "aarch64", "gfx942", "sm_90", ...
    name: str  # as the driver gives it
    memory: int
    wave_size: int
    index: int | None = None

    @property
    def facts(self) -> Arch | None:
        """What is known of a GPU's arch; None for a CPU and for an unknown arch."""
        return facts_of(self.arch) if self.kind == "cuda" else None

    @property
    def fp8(self) -> str | None:
        """The form of the 8-bit floats that weights get here; None for a GPU that has no matrix unit for any. OCP's on
        a CPU, which computes with those of any form."""
        if self.kind == "cpu":
            return "e4m3fn"
        return None if self.facts is None else self.facts.fp8

    def why_not_fp8(self, form: str) -> str | None:
        """Why products of 8-bit floats of a form cannot run here, by the table of archs; None where they can, as those
        of any form do on a CPU."""
        if self.kind == "cpu":
            return None
        return f"of {self.arch} no 8-bit floats are known" if self.facts is None else self.facts.why_not_fp8(form)


# One card for each arch of which one is known.
KNOWN: Mapping[str, Device] = MappingProxyType(
    {arch.name: Device("cuda", arch.vendor, arch.name, arch.card, arch.memory, arch.wave_size)
     for arch in _ARCHS if arch.card}
)  # fmt: skip


def unknown(arch: str) -> str:
    """What to say of an arch that is not in KNOWN."""
    return f"no facts are known of the arch {arch}; known are: {', '.join(KNOWN)}"


def probe(torch_device: torch.device | str) -> Device:
    """The description of a torch device, read once per process.

    Raises ValueError for device types other than cpu and cuda, and torch's own error for a GPU that is not present.
    """
    import torch

    asked = torch.device(torch_device)
    if asked.type == "cpu":
        return _probe_cpu()
    if asked.type != "cuda":
        raise ValueError(f"accelpatch runs on 'cpu' and 'cuda' (NVIDIA, or AMD by ROCm) devices, not on {asked.type!r}")
    return _probe_gpu(torch.cuda.current_device() if asked.index is None else asked.index)


@functools.cache
def _probe_gpu(index: int) -> Device:
    import torch

    return gpu_from_properties(torch.cuda.get_device_properties(index), hip=torch.version.hip is not None, index=index)


def gpu_from_properties(properties: Any, *, hip: bool, index: int | None) -> Device:
    """A Device from what ``torch.cuda.get_device_properties`` returns; ``hip``: torch is a ROCm build."""
    if hip:
        arch = properties.gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-": the features do not choose a kernel
        known = facts_of(arch)
        vendor, wave_size = "amd", known.wave_size if known else 64 if arch.startswith("gfx9") else 32
    else:
        vendor, arch, wave_size = "nvidia", nvidia_arch(10 * properties.major + properties.minor), 32
    return Device("cuda", vendor, arch, properties.name, int(properties.total_memory), wave_size, index)


@functools.cache
def _probe_cpu() -> Device:
    machine, (name, flags) = platform.machine(), _cpu_name_and_flags()
    memory = min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *cgroup_limits(Path("/"))])
    return Device("cpu", "cpu", cpu_arch(machine, flags), name or machine, memory, 1)


def _cpu_name_and_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    if cpuinfo.is_file():
        first = cpuinfo.read_text(errors="replace").split("\n\n")[0]
        fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
        facts = {key.strip(): value.strip() for key, value in fields.items()}
        return facts.get("model name", ""), frozenset(facts.get("flags", "").split())
    import torch  # no /proc (macOS): use torch's detection

    known = {"AVX512": _AVX512, "AVX2": _AVX2}
    return platform.processor(), known.get(torch.backends.cpu.get_cpu_capability(), frozenset())


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def cpu_arch(machine: str, flags: frozenset[str]) -> str:
    """The ``Device.arch`` of a CPU from ``platform.machine()`` and the flags of /proc/cpuinfo."""
    if machine.lower() in ("aarch64", "arm64"):
        return "aarch64"
    if machine.lower() not in ("x86_64", "amd64"):
        return machine.lower()
    if flags >= _AVX512:
        return "x86-64-avx512"
    return "x86-64-avx2" if flags >= _AVX2 else "x86-64"


def cgroup_limits(root: Path) -> list[int]:
    """The memory limits in bytes of this process's cgroups (v1 and v2), at every level up to the root."""
    limits = []
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = ("sys/fs/cgroup", "memory.max") if not controllers else (
            "sys/fs/cgroup/memory", "memory.limit_in_bytes")  # fmt: skip
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1):
            file = root.joinpath(mount, *parts[:depth], name)
            value = file.read_text().strip() if file.is_file() else "max"
            limits += [] if value == "max" else [int(value)]
    return limits


# Compiler -> (variable that names its toolkit, the toolkit's usual place, folders inside); None: searched on PATH only.
_COMPILERS = {
    "hipcc": ("ROCM_PATH", "/opt/rocm", ("bin",)),
    "amdclang++": ("ROCM_PATH", "/opt/rocm", ("bin", "llvm/bin")),
    "nvcc": ("CUDA_HOME", "/usr/local/cuda", ("bin",)),
    "c++": None,
    "g++": None,
    "clang++": None,
}


def packaged() -> list[str]:
    """Folders of programs in NVIDIA's Python packages, such as nvidia/cu13/bin, the newest release first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    found = [folder for root in roots for folder in Path(root).glob("cu[0-9]*/bin")]
    return [str(folder) for folder in sorted(found, key=lambda folder: int(folder.parent.name[2:]), reverse=True)]


def compilers() -> Mapping[str, str | None]:
    """Name -> path of each compiler that can build device sources; None where it is not found.

    Searched in this order: a toolkit that $ROCM_PATH or $CUDA_HOME names, PATH, the toolkit's usual place, and for nvcc
    the Python package nvidia-cuda-nvcc.
    """
    named = tuple((name, os.environ.get(name, "")) for name in ("PATH", "ROCM_PATH", "CUDA_HOME"))
    return _compilers(named, tuple(sys.path))


def forget_compilers() -> None:
    """Look for them anew: one may have been installed since the last plan."""
    _compilers.cache_clear()


@functools.lru_cache(maxsize=4)
def _compilers(environment: tuple[tuple[str, str], ...], packages: tuple[str, ...]) -> Mapping[str, str | None]:
    """See `compilers`; a plan asks for them at each of its sites. packages: where Python's lie."""
    variables, found = dict(environment), dict[str, str | None]()
    for name, toolkit in _COMPILERS.items():
        places: list[str | None] = [None]  # None: PATH
        if toolkit is not None:
            variable, usual, folders = toolkit
            named = [variables[variable]] if variables[variable] else []
            places = [f"{root}/{folder}" for root in named for folder in folders]
            places += [None, *(f"{usual}/{folder}" for folder in folders)]
            places += packaged() if name == "nvcc" else []
        found[name] = next((path for place in places if (path := shutil.which(name, path=place))), None)
    return MappingProxyType(found)
