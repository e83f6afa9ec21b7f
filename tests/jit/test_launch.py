"""Launches through the HIP runtime: a library in its place writes down what it is called with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelpatch.errors import ArgumentError, KernelError
from accelpatch.jit import jit, launch

RUNTIME = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static FILE *out(void) { return fopen(FILE_NAME, "a"); }
int hipModuleLoadData(void **module, const char *code) {
    FILE *f = out(); fprintf(f, "load %d\n", memcmp(code, "\x7f" "ELF", 4)); fclose(f);
    *module = (void *)0x11; return 0;
}
int hipModuleGetFunction(void **function, void *module, const char *name) {
    FILE *f = out(); fprintf(f, "get %p %s\n", module, name); fclose(f);
    *function = (void *)0x22; return strcmp(name, "absent") == 0 ? 500 : 0;
}
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
    FILE *f = out();
    size_t size = *(size_t *)extra[3];
    fprintf(f, "launch %p %u %u %u %u %u %u %u %p %p %d %d %d ", function, gx, gy, gz, bx, by, bz, shared, stream,
            (void *)parameters, (int)(intptr_t)extra[0], (int)(intptr_t)extra[2], (int)(intptr_t)extra[4]);
    for (size_t i = 0; i < size; i++) fprintf(f, "%02x", ((unsigned char *)extra[1])[i]);
    fprintf(f, "\n"); fclose(f);
    return gx == 99 ? 1 : 0;
}
const char *hipGetErrorString(int status) { return status == 1 ? "invalid argument" : "not found"; }
"""


@jit()
def stores(J, value, out: "int*", n: "int"):
    J.s_store_dword(J.gpr("si32", n + value), out, 0)


def absent(J, out: "int*"):
    J.s_nop(0)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the runtime was called with; torch says that it has a gfx942."""
    compiler = shutil.which("cc") or shutil.which("clang-19")
    if compiler is None or not shutil.which("clang-19"):
        pytest.skip("needs a C compiler and clang-19")
    source, library, lines = tmp_path / "hip.c", tmp_path / "libhip.so", tmp_path / "log"
    source.write_text(f'#define FILE_NAME "{lines}"\n{RUNTIME}')
    subprocess.run([compiler, "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
    monkeypatch.setattr(launch, "runtime", lambda: ctypes.CDLL(str(library)))
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, value in {
        "is_available": True, "current_device": 0, "current_stream": SimpleNamespace(cuda_stream=0x77),
        "get_device_properties": SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    launch._function.cache_clear()
    return lines


def test_a_launch(log: Path) -> None:
    """The code is loaded once; the arguments go in one buffer, the stream is torch's."""
    out = torch.zeros(1, dtype=torch.int32)
    stores([3, 2], [64], 7, out.data_ptr(), 5)
    stores([1], [64, 2, 2], 7, out.data_ptr(), -1, stream=0x88)
    load, get, first, second = log.read_text().splitlines()
    address = out.data_ptr().to_bytes(8, "little").hex()
    assert load == "load 0"
    assert get == "get 0x11 stores"
    assert first == f"launch 0x22 3 2 1 64 1 1 0 0x77 (nil) 1 2 3 {address}05000000"
    assert second == f"launch 0x22 1 1 1 64 2 2 0 0x88 (nil) 1 2 3 {address}ffffffff"


def test_what_the_runtime_says(log: Path) -> None:
    with pytest.raises(KernelError, match=r"hipModuleLaunchKernel failed: invalid argument \(1\)"):
        stores([99], [64], 7, 0, 0)
    with pytest.raises(KernelError, match=r"hipModuleGetFunction failed: not found \(500\)"):
        jit()(absent)([1], [64], 0)


def test_tensors_lie_on_the_gpu(log: Path) -> None:
    with pytest.raises(ArgumentError, match="out lies in this machine's memory: move it to the GPU"):
        stores([1], [64], 7, torch.zeros(1, dtype=torch.int32), 5)


def test_without_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    launch.runtime.cache_clear()
    with pytest.raises(KernelError, match=r"there is no libamdhip64\.so here"):
        launch.runtime()
