"""accelpatch doctor env: shows, and prints lines for a shell; changes nothing by itself."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from accelpatch import cache
from accelpatch.cli import facts

from .conftest import Cli, Shell

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = {"torch_device": "cpu", "name": "a CPU", "vendor": "cpu", "arch": "x86-64"}
GPU = {"torch_device": "cuda:0", "name": "NVIDIA H200", "vendor": "nvidia", "arch": "sm_90"}


def test_it_shows_what_is_set_and_advised(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "torch_facts", lambda: {"devices": [CPU, GPU]})
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    printed = cli("doctor", "env").stdout
    assert "NVIDIA H200 (sm_90)" in printed
    assert "! CUDA_LAUNCH_BLOCKING" in printed
    assert "advised: leave it out: it is for debugging" in printed
    assert "sudo sh -c 'echo 0 > /proc/sys/kernel/numa_balancing'" in printed
    assert "HIP_FORCE_DEV_KERNARG" not in printed
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"


def test_json(cli: Cli) -> None:
    found = json.loads(cli("doctor", "env", "--arch", "gfx942", "--for", "parallel", "--json").stdout)
    rows = {one["name"]: one for one in found["settings"]}
    assert (found["vendor"], found["arch"], found["topics"]) == ("amd", "gfx942", ["parallel"])
    assert rows["NCCL_MIN_NCHANNELS"]["advised"] == "112"
    assert rows["HIP_FORCE_DEV_KERNARG"]["advised"] is None
    assert all(row["does"] and row["source"] for row in rows.values())


def test_of_this_machine(shell: Shell) -> None:
    done = shell("doctor", "env")
    assert done.returncode == 0
    assert done.stdout.startswith("device ")
    assert "OMP_NUM_THREADS" in done.stdout


def run_in_shell(lines: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-ec", lines], cwd=tmp_path, capture_output=True, text=True, check=True)


def test_set_then_reset(cli: Cli, tmp_path: Path) -> None:
    before = dict(os.environ)
    done = cli("doctor", "env", "--arch", "gfx942", "--set")
    assert dict(os.environ) == before
    (dot, file) = shlex.split(done.stdout)
    assert dot == "."
    assert "nothing is set yet" in done.stderr
    inside = run_in_shell(f"{done.stdout}env", tmp_path).stdout
    assert "HIP_FORCE_DEV_KERNARG=1\n" in inside
    kept = next(line for line in inside.splitlines() if line.startswith("ACCELPATCH_ENV_SET="))
    cli("doctor", "env", "--arch", "gfx90a", "--for", "determinism", "--set")
    assert "ROCBLAS" in Path(file).read_text()
    variables = {"HIP_FORCE_DEV_KERNARG": "1", "TORCH_BLAS_PREFER_HIPBLASLT": "0"}
    os.environ.update(variables | {"ACCELPATCH_ENV_SET": kept.partition("=")[2]})
    done = cli("doctor", "env", "--reset")
    assert done.stdout == "unset HIP_FORCE_DEV_KERNARG\nunset ACCELPATCH_ENV_SET\n"
    assert "TORCH_BLAS_PREFER_HIPBLASLT stays" in done.stderr
    assert not Path(file).exists()
    assert cache.listing() == []


def test_reset_of_nothing(cli: Cli) -> None:
    done = cli("doctor", "env", "--reset")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "there is no file" in done.stderr
    assert "nothing that it sets is set" in done.stderr


def test_shell_prints_exports_and_writes_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BLAS_PREFER_HIPBLASLT", "0")
    done = cli("doctor", "env", "--arch", "gfx942", "--shell")
    assert "TORCH_BLAS_PREFER_HIPBLASLT stays '0', as you set it; advised is 1" in done.stderr
    assert "HIP_FORCE_DEV_KERNARG=1\n" in run_in_shell(f"{done.stdout}env", tmp_path).stdout
    assert cache.listing() == []


def test_a_cache_folder_with_quotes(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "a b'; touch owned;'"))
    done = cli("doctor", "env", "--arch", "gfx942", "--set")
    assert "HIP_FORCE_DEV_KERNARG=1\n" in run_in_shell(f"{done.stdout}env", tmp_path).stdout
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "options", [["--set", "--reset"], ["--shell", "--set"], ["--json", "--shell"], ["--for", "luck"]], ids=" ".join
)
def test_wrong_usage(cli: Cli, options: list[str]) -> None:
    assert cli("doctor", "env", *options).exit_code == 2


def test_an_arch_that_is_not_known(cli: Cli) -> None:
    done = cli("doctor", "env", "--arch", "gfx000")
    assert done.exit_code == 1
    assert "known are" in done.stderr
    assert cli("doctor", "env", "--arch", "cpu").stdout.split()[:3] == ["device", "the", "CPU"]
