"""Compiles sources of the device library for the CPU, with emulated threads in place of a GPU's."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from accelpatch.kernels.hip import binding

COMPILER = shutil.which("g++")
EMULATOR, KERNELS = Path(__file__).parent, Path(binding.__file__).parent
AMD = ("gfx90a", "gfx942", "gfx950")
ATTENTION = ("attention/decode_attention.hip", "attention/decode_attention_one.hip")
RUN_LONG = ("run.cpp", *ATTENTION)  # products take longer to compile than to run


def compiled(form: str, sources: Sequence[str], name: str, factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library of `sources` in NVIDIA's form, that of before Hopper (ampere) or an AMD architecture's.

    Each source of a form is compiled once for all libraries and processes of a run.
    """
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / f"emulated-{form}"
    # a fortified longjmp() takes another emulated thread's stack for a mistake
    command = [str(COMPILER), "-std=c++20", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-I.", f"-D__{form}__"]

    def built(output: str, *inputs: str) -> str:
        with _once(folder / output) as missing:
            if missing:
                subprocess.run([*command, *inputs, "-o", output], cwd=folder, check=True, timeout=400)
        return output

    def object_of(source: str) -> str:
        return built(f"{source}.o", "-O2" if source in RUN_LONG else "-O1", "-x", "c++", "-c", source)

    with _once(folder) as missing:
        if missing:
            _copy_sources(form, folder)
    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(object_of, ("run.cpp", *sources)))
    return ctypes.CDLL(str(folder / built(f"{name}.so", "-shared", *objects)))


@contextmanager
def _once(path: Path) -> Iterator[bool]:
    """Whether `path` is to be made now; others that want it wait."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not path.exists()


class _Brought(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def brought_by(library: ctypes.CDLL) -> list[tuple[int, int]]:
    """What was brought into L2 since the last call: addresses and bytes, the first address first."""
    found = (_Brought * 1000)()
    return sorted((one.at, one.bytes) for one in found[: library.take_brought(found, 1000)])


def _copy_sources(form: str, folder: Path) -> None:
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for one in EMULATOR.iterdir():
        if one.suffix in (".h", ".cpp"):
            shutil.copy(one, folder)
    shutil.copy(EMULATOR / ("amd.h" if form in AMD else "nvidia.h"), folder / "arch/nvidia.h")
    shutil.move(folder / "peer_access.h", folder / "arch/peer_access.h")
