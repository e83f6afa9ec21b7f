"""Compiles sources of the device library for the CPU, with emulated threads in place of a GPU's."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelpatch.kernels.hip import binding

COMPILER = shutil.which("g++")
EMULATOR, KERNELS = Path(__file__).parent, Path(binding.__file__).parent
AMD = ("gfx90a", "gfx942")
LIBRARY = "simt_emulator.so"


def compiled(form: str, sources: Sequence[str], name: str, factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library of `sources` in NVIDIA's form, that of before Hopper (ampere) or an AMD architecture's.

    Made once for all processes of a run.
    """
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / f"{name}-{form}"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / LIBRARY).exists():
            _compile(form, sources, folder)
    return ctypes.CDLL(str(folder / LIBRARY))


class _Brought(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def brought_by(library: ctypes.CDLL) -> list[tuple[int, int]]:
    """What was brought into L2 since the last call: addresses and bytes, the first address first."""
    found = (_Brought * 1000)()
    return sorted((one.at, one.bytes) for one in found[: library.take_brought(found, 1000)])


def _compile(form: str, sources: Sequence[str], folder: Path) -> None:
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for one in EMULATOR.iterdir():
        if one.suffix in (".h", ".cpp"):
            shutil.copy(one, folder)
    shutil.copy(EMULATOR / ("amd.h" if form in AMD else "nvidia.h"), folder / "nvidia.h")
    # a fortified longjmp() takes another emulated thread's stack for a mistake
    command = [str(COMPILER), "-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-I.", f"-D__{form}__"]

    def made(source: str) -> str:
        subprocess.run([*command, "-x", "c++", "-c", source, "-o", f"{source}.o"], cwd=folder, check=True, timeout=400)
        return f"{source}.o"

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(made, ("run.cpp", *sources)))
    subprocess.run([*command, "-shared", *objects, "-o", LIBRARY], cwd=folder, check=True, timeout=200)
