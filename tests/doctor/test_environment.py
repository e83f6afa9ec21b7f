"""The table of settings, what is advised for a device, and the shell lines that set and undo it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from accelpatch.device import ARCHS
from accelpatch.doctor import environment
from accelpatch.doctor.environment import KEPT, Row
from accelpatch.doctor.settings import CORES, SETTINGS, SYSTEM, TOPICS, UNSET

VENDORS = {"amd", "nvidia", "cpu"}
SHELLS = [name for name in ("sh", "bash", "dash", "zsh") if shutil.which(name)]


def test_the_table_is_sound() -> None:
    names = [one.name for one in SETTINGS]
    assert len(set(names)) == len(names)
    for one in SETTINGS:
        assert environment.NAME.fullmatch(one.name)
        assert one.does
        assert one.source
        assert set(one.devices) <= VENDORS
        for advice in one.advice:
            assert set(advice.where) <= VENDORS | set(ARCHS)
            assert {ARCHS[name].vendor if name in ARCHS else name for name in advice.where} <= set(one.devices)
            assert advice.topic in TOPICS
            assert advice.value == CORES or environment.SAFE.fullmatch(advice.value)
            assert advice.why
    for system in SYSTEM:
        assert system.topic in TOPICS
        assert all((system.set_by, system.undone_by, system.why))


def test_what_the_guides_name_is_in_it() -> None:
    """The guide's settings, and those of today."""
    wanted = {
        "HIP_FORCE_DEV_KERNARG", "HSA_TOOLS_LIB", "HSA_ENABLE_DEBUG", "HSA_DISABLE_FRAGMENT_ALLOCATOR",
        "PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_MIOPEN_SUGGEST_NHWC", "PYTORCH_TUNABLEOP_ENABLED",
        "HIPBLASLT_TUNING_MODE", "HIPBLASLT_TUNING_CACHE_PATH", "TENSILE_SOLUTION_SELECTION_METHOD",
        "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "MIOPEN_FIND_MODE",
        "OMP_NUM_THREADS", "OMP_PROC_BIND", "HSA_NO_SCRATCH_RECLAIM", "GPU_MAX_HW_QUEUES",
    }  # fmt: skip
    assert wanted <= {one.name for one in SETTINGS}
    assert {"kernel.numa_balancing", "clock limit"} == {one.name for one in SYSTEM}


def row(name: str, vendor: str, arch: str, *topics: str, **variables: str) -> Row:
    found = environment.rows(vendor, arch, topics or ("speed",), variables)
    return next(one for one in found if one.name == name)


def test_advice_is_for_the_device_and_the_topic() -> None:
    assert row("HIP_FORCE_DEV_KERNARG", "amd", "gfx942").advised == "1"
    assert row("HIP_FORCE_DEV_KERNARG", "amd", "gfx1100").advised is None
    assert row("CUDA_DEVICE_MAX_CONNECTIONS", "nvidia", "sm_90").advised == UNSET
    assert row("CUDA_DEVICE_MAX_CONNECTIONS", "nvidia", "sm_90", "parallel").advised == "1"
    assert row("CUDA_DEVICE_MAX_CONNECTIONS", "nvidia", "sm_100", "parallel").advised is None
    assert row("CUBLAS_WORKSPACE_CONFIG", "nvidia", "sm_90", "determinism").advised == ":4096:8"
    assert row("OMP_NUM_THREADS", "cpu", "").advised == str(environment.cores())
    assert {one.name for one in environment.rows("cpu", "")}.isdisjoint({"HIP_FORCE_DEV_KERNARG", "HSA_XNACK"})


def test_what_is_set_beside_what_is_advised() -> None:
    assert not row("HIP_FORCE_DEV_KERNARG", "amd", "gfx942").follows
    assert row("HIP_FORCE_DEV_KERNARG", "amd", "gfx942", HIP_FORCE_DEV_KERNARG="1").follows
    assert not row("CUDA_LAUNCH_BLOCKING", "nvidia", "sm_90", CUDA_LAUNCH_BLOCKING="1").follows
    assert row("CUDA_LAUNCH_BLOCKING", "nvidia", "sm_90").follows
    assert row("CUDA_VISIBLE_DEVICES", "nvidia", "sm_90", CUDA_VISIBLE_DEVICES="3").follows  # the user's choice


def shell(name: str, lines: list[str], **variables: str) -> dict[str, str]:
    """The environment after a shell ran lines."""
    (path,) = [shutil.which(name)]
    assert path is not None
    text = "\n".join([*lines, "exec env -0"])
    base = {"PATH": os.environ["PATH"]}
    done = subprocess.run([path, "-c", f"set -u\n{text}"], env=base | variables, capture_output=True, check=True)
    pairs = [one.partition("=") for one in done.stdout.decode().split("\0") if one]
    return {key: value for key, _, value in pairs if key not in ("PWD", "SHLVL", "_", "OLDPWD")}


@pytest.mark.parametrize("name", SHELLS)
def test_the_lines_set_and_undo_exactly(name: str) -> None:
    before = shell(name, [])
    rows = environment.rows("amd", "gfx942", ("speed", "determinism"), before)
    lines = environment.exports(rows)
    after = shell(name, lines)
    assert after["HIP_FORCE_DEV_KERNARG"] == "1"
    assert after["ROCBLAS_DEFAULT_ATOMICS_MODE"] == "0"
    assert set(after) - set(before) == {one.name for one in rows if one.advised} | {KEPT}
    assert shell(name, [*lines, *lines])[KEPT] == after[KEPT]
    assert shell(name, [*lines, *environment.undoes(after)]) == before


@pytest.mark.parametrize("name", SHELLS)
def test_what_the_user_set_stays(name: str) -> None:
    lines = environment.exports(environment.rows("amd", "gfx942", variables={}))
    after = shell(name, lines, HIP_FORCE_DEV_KERNARG="0", TORCH_BLAS_PREFER_HIPBLASLT="")
    assert after["HIP_FORCE_DEV_KERNARG"] == "0"
    assert after["TORCH_BLAS_PREFER_HIPBLASLT"] == ""
    assert environment.undoes(after) == [f"unset {KEPT}"]


def test_what_was_changed_since_stays() -> None:
    now = {KEPT: "HIP_FORCE_DEV_KERNARG=1;NCCL_MIN_NCHANNELS=112;", "HIP_FORCE_DEV_KERNARG": "0"}
    assert environment.undoes(now | {"NCCL_MIN_NCHANNELS": "112"}) == ["unset NCCL_MIN_NCHANNELS", f"unset {KEPT}"]
    assert environment.changed(now) == ["HIP_FORCE_DEV_KERNARG", "NCCL_MIN_NCHANNELS"]
    assert environment.undoes({}) == []


def test_ours_is_marked() -> None:
    assert row("HIP_FORCE_DEV_KERNARG", "amd", "gfx942", **{KEPT: "HIP_FORCE_DEV_KERNARG=1;",
               "HIP_FORCE_DEV_KERNARG": "1"}).by_us  # fmt: skip
    assert not row("HIP_FORCE_DEV_KERNARG", "amd", "gfx942", HIP_FORCE_DEV_KERNARG="1").by_us


@pytest.mark.parametrize("text", ["PATH=/bin", "a; touch owned=1", "HIP_FORCE_DEV_KERNARG=$(touch owned)", "=", ";;="])
def test_a_hostile_list_makes_no_line(text: str) -> None:
    """The lines are for a shell, and the list is text of the environment."""
    name, _, value = text.partition("=")
    assert environment.undoes({KEPT: text, name: value}) == [f"unset {KEPT}"]


def test_a_value_that_needs_quotes_is_refused() -> None:
    with pytest.raises(ValueError, match="quotes"):
        environment.exports([Row("HIP_FORCE_DEV_KERNARG", None, "", "", "$(id)")])


def test_settings_of_the_machine(tmp_path: Path) -> None:
    (found,) = environment.system_rows("nvidia", root=tmp_path)
    assert found["value"] is None
    file = tmp_path / "proc/sys/kernel/numa_balancing"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    (found,) = environment.system_rows("nvidia", root=tmp_path)
    assert (found["value"], found["advised"]) == ("1", "0")
    assert environment.system_rows("cpu", root=tmp_path) == []
    assert [one["name"] for one in environment.system_rows("amd", ("determinism",), tmp_path)] == ["clock limit"]
    assert file.read_text() == "1\n"


def test_cores_are_those_of_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert environment.cores(tmp_path) == 8
    for cpu in range(8):
        file = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert environment.cores(tmp_path) == 4
    limit = tmp_path / "sys/fs/cgroup/cpu.max"
    limit.parent.mkdir(parents=True)
    for text, cores in {"250000 100000": 2, "50000 100000": 1, "max 100000": 4, "damaged": 4}.items():
        limit.write_text(text)
        assert environment.cores(tmp_path) == cores
    (tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    assert "2 NUMA nodes" in environment.affinity(tmp_path)
    assert "numactl" in environment.affinity(tmp_path)
