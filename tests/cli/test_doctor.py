"""accelpatch doctor: raises nothing, hangs nowhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from accelpatch import device
from accelpatch.cli import doctor, facts

from .conftest import Cli, Shell


def _program(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return path


def test_it_says_what_is_here(shell: Shell) -> None:
    start = time.perf_counter()
    found = json.loads(shell("doctor", "--json").stdout)
    assert time.perf_counter() - start < 10
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["devices"][0]["vendor"] == "cpu"
    assert found["torch"]["cpu_kernels"].startswith(("compiled", "came with accelpatch", "prebuilt", "none: "))
    assert set(found["optional"]) == set(doctor.PACKAGES)
    assert found["environment"]["OMP_NUM_THREADS"] == "1"


def test_every_missing_thing_says_what_it_would_give(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "version", lambda name: None)
    monkeypatch.setattr(facts, "compiler", lambda name: None)
    lines = cli("doctor").stdout.splitlines()
    for name in (*doctor.PACKAGES, *doctor.COMPILERS):
        line = next(line for line in lines if line.split()[0] == name)
        assert doctor.GIVES[name] in line


def test_torch_that_hangs(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = _program(tmp_path / "python", "import time; time.sleep(30)")
    monkeypatch.setattr(facts, "TIMEOUT", 0.5)
    monkeypatch.setattr(sys, "executable", str(slow))
    start = time.perf_counter()
    result = cli("doctor")
    assert time.perf_counter() - start < 5
    assert result.exit_code == 0
    assert "problem: importing torch" in result.stdout


def test_torch_that_is_broken(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = _program(tmp_path / "python", "raise ImportError('libcudart.so.13: cannot open')")
    monkeypatch.setattr(sys, "executable", str(broken))
    result = cli("doctor")
    assert result.exit_code == 0
    assert "problem: ImportError: libcudart.so.13: cannot open" in result.stdout


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("print('hipcc 7.1.2\\nbuilt for Debian')", "hipcc 7.1.2", id="answers"),
        pytest.param("print('Copyright 2025\\nCuda tools, release 13.0')", "release 13.0", id="copyright first"),
        pytest.param("import time; time.sleep(30)", "does not answer", id="hangs"),
        pytest.param("raise SystemExit(3)", "status 3", id="fails"),
    ],
)
def test_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, words: str) -> None:
    _program(tmp_path / "hipcc", body)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(facts, "TIMEOUT", 2.0)
    assert words in str(facts.compiler("hipcc"))


def test_a_compiler_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvcc").write_bytes(b"\x00not a program")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "does not start" in str(facts.compiler("nvcc"))


def test_nvcc_of_the_python_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _program(tmp_path / "nvcc", "print('Cuda tools, release 13.5')")
    monkeypatch.setattr(device, "compilers", lambda: {"nvcc": str(tmp_path / "nvcc")})
    assert "package" not in str(facts.compiler("nvcc"))
    monkeypatch.setattr(device, "packaged", lambda: [str(tmp_path)])
    assert str(facts.compiler("nvcc")).startswith(f"{tmp_path}/nvcc (of the Python package nvidia-cuda-nvcc): Cuda")


def test_a_cache_that_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "open"))
    result = cli("doctor")
    assert result.exit_code == 0
    assert "cache" in result.stdout
    assert "problem: " in result.stdout


def test_overriding_variables_are_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "9.4.2")
    monkeypatch.setenv("ACCELPATCH_SOMETHING_NEW", "1")
    lines = {line.split()[0]: line.split()[1] for line in cli("doctor").stdout.splitlines() if line[0] == "$"}
    assert lines["$HSA_OVERRIDE_GFX_VERSION"] == "9.4.2"
    assert lines["$ACCELPATCH_SOMETHING_NEW"] == "1"
