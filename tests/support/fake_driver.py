"""A stand-in for the drivers of GPUs, in C, on which kernel files are loaded and launched with tensors of the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from accelpatch.device import KNOWN
from accelpatch.kernels.compiling import driver, file_kernel, launch
from tests.support.small_library import COMPILER

SOURCE = Path(__file__).with_suffix(".cpp")
STREAM = 77  # torch's current one
HERE = -1  # the index of a tensor on the CPU, in the place of a GPU's


class Launch(ctypes.Structure):
    """Mirror of `Launch`."""

    _fields_ = (("sizes", ctypes.c_uint32 * 7), ("stream", ctypes.c_int64), ("values", ctypes.c_uint64 * 16))


@functools.cache
def library() -> ctypes.CDLL:
    """The stand-in, compiled once a process."""
    folder = Path(tempfile.mkdtemp())
    command = [str(COMPILER), "-std=c++17", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(folder / "driver.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "driver.so"))


class FakeDriver(driver.Driver):
    """As the real one, on the stand-in."""

    def __init__(self, names: driver.Names, library: ctypes.CDLL):
        super().__init__(names, library)
        self.current_device = lambda: HERE
        self.current_stream = lambda index: STREAM

    def on(self, index: int) -> Any:
        return nullcontext()

    def number(self, name: str) -> ctypes.c_int:
        """A counter or a setting of the stand-in."""
        return ctypes.c_int.in_dll(self.library, name)

    @property
    def last(self) -> Launch:
        """The last launch."""
        return Launch.in_dll(self.library, "last")

    def value(self, at: int, kind: Any = ctypes.c_int64) -> Any:
        """An argument of the last launch, read as a C type."""
        return kind.from_buffer(self.last.values, 8 * at).value


@contextmanager
def machine(arch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A machine with a GPU of an arch, whose tensors are those of the CPU."""
    device = dataclasses.replace(KNOWN[arch], index=HERE)
    made = FakeDriver(driver.NAMES[device.vendor], library())
    for name in ("launches", "loads", "count", "most_shared", "status"):
        made.number(name).value = 0
    with monkeypatch.context() as patch:
        patch.setattr(driver, "of_vendor", lambda vendor: made)
        patch.setattr(file_kernel, "device_at", lambda index, file: device)
        patch.setattr(launch, "current", lambda: device)
        patch.setattr(launch, "_modules", {})
        yield made
