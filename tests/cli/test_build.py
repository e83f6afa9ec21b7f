"""accelpatch build: for this machine and for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelpatch.device import KNOWN, probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.gpu_libraries import GPU_LIBRARIES
from accelpatch.kernels.compiling.targets import compiler, target

from .conftest import Cli

needs_nvcc = pytest.mark.skipif(compiler(target("gemv_bf16", KNOWN["sm_90"])) is None, reason="needs nvcc")
needs_compiler = pytest.mark.skipif(compiler(target("cpu", probe("cpu"))) is None, reason="needs a C++ compiler")


@needs_compiler
def test_the_library_of_this_machine(cli: Cli, tmp_path: Path) -> None:
    [built] = json.loads(cli("build", "--out", str(tmp_path), "--json").stdout)
    assert built["library"] == "cpu"
    assert Path(built["folder"]) == libraries.place(tmp_path, "cpu", target("cpu", probe("cpu")))
    assert (Path(built["folder"]) / libraries.LIBRARY).is_file()


def test_no_compiler_for_an_arch(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPCC", "no-such-compiler")
    result = cli("build", "--arch", "gfx942")
    assert result.exit_code == 1
    assert "HIPCC names 'no-such-compiler'" in result.stderr


def test_an_arch_that_nobody_knows(cli: Cli) -> None:
    result = cli("build", "--arch", "gfx1")
    assert result.exit_code == 1
    assert "no kernels for the arch 'gfx1'" in result.stderr


def test_a_folder_that_cannot_be_made(cli: Cli) -> None:
    result = cli("build", "--out", "/proc/libraries")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    assert "name another folder" in result.stderr


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["gemv_bf16"], pytest.param(list(GPU_LIBRARIES), marks=pytest.mark.nightly)], ids=["one", "all"]
)
def test_another_machine_with_a_report(
    names: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "names_of", lambda device: names)
    built = json.loads(cli("build", "--arch", "sm_90", "--out", str(tmp_path), "--report", "--json").stdout)
    assert [one["library"] for one in built] == names
    assert all((tmp_path / f"{name}-sm_90" / libraries.LIBRARY).is_file() for name in names)
    [of_gemv] = [one["kernels"] for one in built if one["library"] == "gemv_bf16"]
    plain = next(kernel for kernel in of_gemv if "Plain, Bf16" in kernel["kernel"])
    assert 64 <= plain["registers"] <= 255
    assert plain["waves"] >= 2
    assert plain["threads"] == 256
