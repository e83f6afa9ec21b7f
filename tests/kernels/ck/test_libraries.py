"""Composable Kernel's libraries: for AMD Instinct alone, which one a product takes, what is said where none runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from accelpatch.device import KNOWN, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ck import binding
from accelpatch.kernels.compiling import ck_libraries, compiler, libraries
from accelpatch.kernels.compiling.ck_libraries import CK_LIBRARIES, library_of
from accelpatch.kernels.compiling.targets import names_of, target
from accelpatch.kernels.ops.linear import gemm_w8a8
from accelpatch.kernels.spec import Spec

INSTINCT = KNOWN["gfx942"]
HERE = dataclasses.replace(INSTINCT, index=0)
NAME = "ck_linear_i8_256x128"
ARCHS = ("gfx90a", "gfx942", "gfx950")  # those that the gate compiles for
OTHERS = [device for device in (*KNOWN.values(), probe("cpu")) if device.arch not in ARCHS]


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A ROCm with a compiler and no headers of CK."""
    for name in ("ACCELPATCH_KERNELS", "CK_PATH", "HIPCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/hipcc").write_text("#!/bin/sh\necho 'a compiler that fails' >&2; [ $1 = --version ]\n")
    (tmp_path / "bin/hipcc").chmod(0o755)
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})
    return tmp_path


def with_headers(folder: Path) -> Path:
    """Headers of CK in a folder."""
    (folder / "ck").mkdir(parents=True)
    for name in ("ck.hpp", "config.h"):
        (folder / "ck" / name).write_text("")
    return folder


def spec(m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Spec:
    return gemm_w8a8.of_shape(m, n, k, dtype, **options)


@pytest.mark.parametrize("device", OTHERS, ids=lambda device: device.arch)
def test_no_other_device_has_them(device: Any, rocm: Path) -> None:
    with_headers(rocm / "include")
    if device.arch != "gfx1100":  # which has none at all
        assert not set(CK_LIBRARIES) & set(names_of(device))
    with pytest.raises(KernelError, match="no library"):
        target(NAME, device)
    said = f"Composable Kernel is for AMD Instinct (gfx90a, gfx942, gfx950), not for {device.arch}"
    assert libraries.why_not(NAME, device) == (
        said if device.kind == "cuda" else said.replace(device.arch, device.name)
    )
    reason = dispatch.why_not("gemm_w8a8", "ck", spec(64, 64, 64, torch.float32), device)
    assert str(reason).startswith("Composable Kernel is for AMD Instinct")


@pytest.mark.parametrize("arch", ARCHS)
def test_instinct_has_them_where_the_headers_are(arch: str, rocm: Path) -> None:
    assert not set(CK_LIBRARIES) & set(names_of(KNOWN[arch]))
    folder = with_headers(rocm / "include")
    assert set(CK_LIBRARIES) <= set(names_of(KNOWN[arch]))
    made = target(NAME, KNOWN[arch])
    assert made.include == str(folder)
    assert f"--offload-arch={arch}" in made.flags
    assert made.sources == {"gemm_w8a8.hip": ("-DONLY_FORM=1", "-DONLY_OUTPUT=0", "-DONLY_TILE=0")}
    assert (made.home / "gemm_w8a8.hip").is_file()
    assert compiler.including(made)[-2:] == ["-isystem", str(folder)]


def test_each_library_is_another_instance() -> None:
    every = [libraries.digest(target(name, INSTINCT)) for name in CK_LIBRARIES]
    assert len(set(every)) == len(every) == 48


def test_how_to_install_it_is_said(rocm: Path) -> None:
    reason = str(libraries.why_not(NAME, HERE))
    assert "composablekernel-dev" in reason
    assert "CK_PATH" in reason
    assert dispatch.why_not("gemm_w8a8", "ck", spec(512, 512, 512, torch.int8, d=torch.int8), HERE) == reason
    with pytest.raises(KernelError, match="composablekernel-dev"):
        libraries.library(NAME, HERE)
    with pytest.raises(KernelError, match="composablekernel-dev"):
        libraries.build([NAME], HERE)
    (rocm / "bin/hipcc").unlink()
    assert "install ROCm" in str(libraries.why_not(NAME, HERE)), "a compiler is missing first"


def test_a_plan_for_another_machine_takes_it() -> None:
    assert libraries.why_not(NAME, INSTINCT) is None
    assert dispatch.choose("gemm_w8a8", spec(512, 512, 512, torch.bfloat16, scaled=True), INSTINCT) == "ck"


@pytest.mark.parametrize("inside", ["", "include"], ids=["include folder", "installed"])
def test_ck_path_goes_first(inside: str, rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_headers(rocm / "include")
    folder = with_headers(rocm / "other" / inside)
    monkeypatch.setenv("CK_PATH", str(rocm / "other"))
    assert ck_libraries.headers() == folder
    assert libraries.why_not(NAME, HERE) is None
    (folder / "ck/config.h").unlink()
    assert ck_libraries.headers() is None, "a checkout that was not configured"


def test_other_headers_make_another_library(rocm: Path) -> None:
    made = target(NAME, dataclasses.replace(HERE))
    folder = with_headers(rocm / "include")
    found, path = target(NAME, HERE), str(rocm / "bin/hipcc")
    keys = [libraries.key(NAME, one, path) for one in (made, found)]
    (folder / "ck/version.h").write_text("#define CK_VERSION 2")
    assert len({*keys, libraries.key(NAME, found, path)}) == 3
    assert libraries.digest(made) == libraries.digest(found), "a prebuilt library is loaded without headers"


def test_the_compiler_gets_the_headers(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(rocm / "cache"))
    folder = with_headers(rocm / "include")
    with pytest.raises(KernelError, match=f"-isystem {folder} -DONLY_FORM=1"):
        libraries.library(NAME, HERE)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"activation": "silu"}, "ReLU alone, not silu"),
        ({"activation": "gelu"}, "ReLU alone, not gelu"),
        ({"correction": True}, "no correction"),
        ({"residual": True}, "no residual"),
        ({"d": torch.float32}, "D is of E's dtype, torch.int8, not torch.float32"),
        ({"m": 1 << 20, "n": 2048}, "2\\^31 bytes"),
        ({"m": 1 << 16, "batch": 1 << 9}, "2\\^31 bytes"),
        ({"n": 1 << 22}, "2\\^31 bytes"),
        ({"dtype": torch.float64}, "not torch.float64"),
    ],
    ids=str,
)
def test_what_it_does_not_cover(changes: dict[str, Any], words: str) -> None:
    sizes = {"m": 64, "n": 64, "k": 512, "dtype": torch.int8, "d": torch.int8, "activation": "relu"}
    assert dispatch.why_not("gemm_w8a8", "ck", spec(**sizes), INSTINCT) is None  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=words):
        assert dispatch.why_not("gemm_w8a8", "ck", spec(**(sizes | changes)), INSTINCT) is None


def test_the_options_of_a_call() -> None:
    a, b = torch.zeros(4, 16, dtype=torch.int8), torch.zeros(8, 16, dtype=torch.int8)
    assert gemm_w8a8.spec(a, b, 1.0).options == {
        "d": None, "scaled": False, "activation": "none", "correction": False, "residual": False,
    }  # fmt: skip
    whole = (torch.ones(4), None, torch.zeros(8), 1.0, torch.zeros(8, dtype=torch.int32), "silu", torch.zeros(4, 8))
    assert gemm_w8a8.spec(a, b, 1.0, *whole).options == {
        "d": torch.float32, "scaled": True, "activation": "silu", "correction": True, "residual": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "m, n, k, dtype, options, name",
    [
        (4096, 4096, 4096, torch.int8, {"d": torch.int8}, "ck_linear_i8_256x128"),
        (1, 4096, 4096, torch.int8, {"d": torch.int8}, "ck_linear_i8_64x128"),
        (4096, 4096, 4096, torch.float32, {}, "ck_bmm_fp32_256x128"),
        (128, 128, 64, torch.float32, {"batch": 512}, "ck_bmm_fp32_256x128"),
        (128, 128, 64, torch.float32, {"batch": 2}, "ck_bmm_fp32_64x128"),
        (64, 4096, 4096, torch.bfloat16, {"scaled": True}, "ck_scaled_bf16_64x128"),
        (64, 4095, 4096, torch.float16, {"scaled": True, "d": torch.float16}, "ck_scaled_bias_fp16_64x128"),
        (4096, 4095, 4096, torch.int8, {"d": torch.int8}, "ck_linear_i8_any"),
        (4096, 4088, 4096, torch.int8, {"d": torch.int8}, "ck_linear_i8_any"),
        (4096, 4088, 4096, torch.bfloat16, {"d": torch.bfloat16}, "ck_linear_bf16_256x128"),
        (4096, 4096, 4097, torch.bfloat16, {"scaled": True}, "ck_scaled_bf16_any"),
        (0, 4096, 4096, torch.int8, {"d": torch.int8}, "ck_linear_i8_any"),
    ],
)
def test_the_instance_of_a_product(
    m: int, n: int, k: int, dtype: torch.dtype, options: dict[str, Any], name: str
) -> None:
    assert binding.library_name(spec(m, n, k, dtype, **options)) == name
    assert name in CK_LIBRARIES


def test_the_libraries_to_build_in_advance() -> None:
    layer = spec(1, 4096, 4096, torch.bfloat16, scaled=True)
    assert binding.library_names(layer, INSTINCT) == ("ck_scaled_bf16_64x128", "ck_scaled_bf16_128x128")
    assert binding.library_names(spec(1, 96, 4096, torch.bfloat16), INSTINCT) == ("ck_bmm_bf16_64x128",)
    assert binding.library_names(layer, KNOWN["sm_90"]) == ()


def test_a_name_that_is_none() -> None:
    with pytest.raises(AssertionError, match="ck_linear_i8_1x1"):
        library_of("linear", "i8", "1x1")
