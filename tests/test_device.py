"""What is said of the hardware: of the CPU that is here, of GPUs by torch's words for them, of those that are known."""

from __future__ import annotations

import ast
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelpatch import device
from accelpatch.device import (
    ARCHS,
    GIB,
    KNOWN,
    Device,
    cgroup_limits,
    compilers,
    cpu_arch,
    facts_of,
    gpu_from_properties,
    probe,
)


def _properties(**facts: object) -> SimpleNamespace:
    return SimpleNamespace(**{"name": "a card", "total_memory": 64 * GIB, "major": 9, "minor": 4} | facts)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The facts are kept for the whole process; a test with a stub must neither find nor leave any."""
    caches = (device._probe_cpu, device._probe_gpu)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_the_cpu_that_is_here() -> None:
    here = probe("cpu")
    assert (here.kind, here.vendor, here.wave_size, here.index) == ("cpu", "cpu", 1, None)
    assert here is probe(torch.device("cpu"))
    assert 0 < here.memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and "ATEN_CPU_CAPABILITY" not in os.environ:
        assert {"x86-64-avx512": "AVX512", "x86-64-avx2": "AVX2", "x86-64": "DEFAULT"}[here.arch] == capability


@pytest.mark.parametrize(
    ("machine", "flags", "arch"),
    [
        pytest.param("x86_64", "avx2 fma f16c avx512f avx512bw avx512dq avx512vl amx", "x86-64-avx512", id="avx512"),
        pytest.param("x86_64", "avx2 fma f16c avx512f", "x86-64-avx2", id="avx512 without byte instructions"),
        pytest.param("AMD64", "avx2 fma f16c", "x86-64-avx2", id="avx2"),
        pytest.param("x86_64", "avx2", "x86-64", id="avx2 without fma"),
        pytest.param("x86_64", "", "x86-64", id="baseline"),
        pytest.param("aarch64", "asimd", "aarch64", id="arm"),
        pytest.param("arm64", "", "aarch64", id="arm on macOS"),
        pytest.param("riscv64", "", "riscv64", id="another"),
    ],
)
def test_cpu_arch(machine: str, flags: str, arch: str) -> None:
    assert cpu_arch(machine, frozenset(flags.split())) == arch


def test_cpu_name_and_flags_of_the_first_core(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: AMD EPYC: 9\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: none\n")
    assert device._cpu_name_and_flags(file) == ("AMD EPYC: 9", frozenset({"fpu", "avx2"}))
    file.write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert device._cpu_name_and_flags(file) == ("", frozenset())


@pytest.mark.parametrize(
    ("capability", "arch"), [("AVX512", "x86-64-avx512"), ("AVX2", "x86-64-avx2"), ("DEFAULT", "x86-64")]
)
def test_flags_come_from_torch_where_there_is_no_proc(
    capability: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    _, flags = device._cpu_name_and_flags(tmp_path / "none")
    assert cpu_arch("x86_64", flags) == arch


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        pytest.param({}, [], id="no cgroups"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000\n"}, [1000], id="v2 in a container"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "3000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            [3000],
            id="v2, the parent's limit binds",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1\n",
            },
            [2000],
            id="v1, own path hidden by the container",
        ),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], limits: list[int]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_limits(tmp_path) == limits


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("limits", "bound"), [([], False), ([5, 12345], True), ([2**63], False)])
def test_cpu_memory_is_the_containers(limits: list[int], bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cgroup_limits", lambda root: limits)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert probe("cpu").memory == (5 if bound else physical)


@pytest.mark.parametrize(
    ("gcn", "arch", "wave_size"),
    [
        pytest.param("gfx942:sramecc+:xnack-", "gfx942", 64, id="MI300X"),
        pytest.param("gfx90a:sramecc+:xnack-", "gfx90a", 64, id="MI210"),
        pytest.param("gfx950:sramecc+:xnack-", "gfx950", 64, id="MI350X"),
        pytest.param("gfx1030", "gfx1030", 32, id="RDNA 2"),
        pytest.param("gfx1100", "gfx1100", 32, id="RDNA 3"),
        pytest.param("gfx1201", "gfx1201", 32, id="RDNA 4"),
    ],
)
def test_amd(gcn: str, arch: str, wave_size: int) -> None:
    found = gpu_from_properties(_properties(gcnArchName=gcn), hip=True, index=3)
    assert found == Device("cuda", "amd", arch, "a card", 64 * GIB, wave_size, 3)


@pytest.mark.parametrize(
    ("major", "minor", "arch"),
    [(8, 0, "sm_80"), (8, 9, "sm_89"), (9, 0, "sm_90"), (10, 0, "sm_100"), (12, 0, "sm_120")],
    ids=["A100", "L40S", "H200", "B200", "RTX 5090"],
)
def test_nvidia(major: int, minor: int, arch: str) -> None:
    found = gpu_from_properties(_properties(major=major, minor=minor), hip=False, index=0)
    assert found == Device("cuda", "nvidia", arch, "a card", 64 * GIB, 32, 0)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("hip", "vendor", "arch"), [("6.4", "amd", "gfx942"), (None, "nvidia", "sm_90")])
def test_probe_asks_torch_once_for_each_gpu(
    hip: str | None, vendor: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return _properties(minor=0, gcnArchName="gfx942:xnack-", name=f"card {index}")

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert probe("cuda") is probe("cuda:1") is probe(torch.device("cuda", 1))
    assert (probe("cuda").vendor, probe("cuda").arch, probe("cuda").index) == (vendor, arch, 1)
    assert probe("cuda:0").name == "card 0"
    assert asked == [1, 0]


@pytest.mark.parametrize("other", ["meta", "mps", "xpu"])
def test_other_device_types_are_refused(other: str) -> None:
    with pytest.raises(ValueError, match=f"not on '{other}'"):
        probe(other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_the_gpu_that_is_here() -> None:
    here, properties = probe("cuda"), torch.cuda.get_device_properties(0)
    assert here.wave_size == properties.warp_size
    assert here.memory == torch.cuda.mem_get_info(0)[1]
    if (known := KNOWN.get(here.arch)) is not None and known.name == here.name:
        assert abs(known.memory - here.memory) < GIB


def test_known_devices() -> None:
    assert set(KNOWN) == {
        "gfx90a", "gfx942", "gfx950", "gfx1100", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120",
    }  # fmt: skip
    for arch, known in KNOWN.items():
        vendor, wave_size = ("amd" if arch.startswith("gfx") else "nvidia"), 64 if arch.startswith("gfx9") else 32
        assert (known.arch, known.kind, known.vendor, known.wave_size) == (arch, "cuda", vendor, wave_size)
        assert known.index is None
    label = {
        "gfx90a": 64,
        "gfx942": 192,
        "gfx950": 288,
        "gfx1100": 24,
        "sm_80": 80,
        "sm_86": 24,
        "sm_89": 48,
        "sm_90": 141,
        "sm_100": 186,
        "sm_120": 32,
    }
    assert all(0.92 * label[arch] < known.memory / GIB < label[arch] for arch, known in KNOWN.items())
    with pytest.raises(TypeError):
        KNOWN["gfx90a"] = KNOWN["gfx942"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("arch", "like"),
    [("sm_90a", "sm_90"), ("sm_110", "sm_103"), ("sm_130", "sm_121"), ("sm_88", "sm_87"), ("gfx942", "gfx942")],
)
def test_facts_of_an_arch(arch: str, like: str) -> None:
    found, known = facts_of(arch), ARCHS[like]
    assert found is not None
    named = {"name": found.name, "card": found.card, "memory": found.memory, "bandwidth": found.bandwidth}
    assert found == replace(known, **named)  # type: ignore[arg-type]
    assert found.card in (None, known.card)


@pytest.mark.parametrize("arch", ["gfx906", "sm_70", "x86-64-avx2", "", "sm_", "sm_x"])
def test_archs_of_which_nothing_is_known(arch: str) -> None:
    assert facts_of(arch) is None
    assert Device("cuda", "nvidia", arch, "a card", GIB, 32).facts is None


def test_a_cpu_has_no_facts_of_a_gpu() -> None:
    assert probe("cpu").facts is None


def test_the_newer_has_what_the_older_had() -> None:
    for arch in ARCHS.values():
        if arch.vendor == "nvidia":
            assert arch.clusters == arch.dependent_launch == (arch.number >= 90)
            assert arch.shared - arch.block_shared == (1024 if arch.number >= 80 else 0)


def test_no_other_file_names_an_arch() -> None:
    root = Path(device.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}: {node.value!r}"
        for path in root.rglob("*.py")
        if path != Path(device.__file__) and "jit" not in path.relative_to(root).parts  # about their instructions
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"(sm_|gfx)\w*", node.value)
    ]
    assert found == []


def _program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"PATH": tmp_path / "bin", "ROCM_PATH": tmp_path / "rocm", "CUDA_HOME": ""}.items():
        monkeypatch.setenv(variable, str(value))
    expected = {
        "hipcc": _program(tmp_path / "rocm/bin/hipcc"),
        "amdclang++": _program(tmp_path / "rocm/llvm/bin/amdclang++"),
        "nvcc": _program(tmp_path / "bin/nvcc"),
        "c++": None,
        "g++": _program(tmp_path / "bin/g++"),
        "clang++": None,
    }
    _program(tmp_path / "bin/hipcc")  # the toolkit that a variable names comes before PATH
    (tmp_path / "bin/clang++").write_text("not a program")
    assert dict(compilers()) == expected


def test_the_compiler_of_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PATH", "CUDA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "nothing"))
    older, newer = (_program(tmp_path / f"site/nvidia/{name}/bin/nvcc") for name in ("cu13", "cu14"))
    monkeypatch.setattr(device, "_COMPILERS", {"nvcc": ("CUDA_HOME", str(tmp_path / "usual"), ("bin",))})
    assert compilers()["nvcc"] is None
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert compilers()["nvcc"] == newer
    Path(newer).unlink()
    device.forget_compilers()
    assert compilers()["nvcc"] == older
    usual = _program(tmp_path / "usual/bin/nvcc")
    device.forget_compilers()
    assert compilers()["nvcc"] == usual  # the toolkit's place comes first
