"""A compiled kernel that is loaded on a device, and its launches.

What a launch costs the host is what its driver takes and a few microseconds: the sizes of the last one are remembered,
the memory for arguments is there (each thread has its own), and so is the driver's function with its C types.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import torch

from accelpatch.device import Device
from accelpatch.errors import ArgumentError, KernelError
from accelpatch.kernels.compiling import binary, driver
from accelpatch.kernels.compiling.arguments import Arguments
from accelpatch.kernels.compiling.driver import Driver
from accelpatch.kernels.compiling.parameters import Parameter

GRID = (2**31 - 1, 65535, 65535)  # the most blocks of a launch, by the CUDA programming guide and HIP's
BLOCK = (1024, 1024, 64)

_modules: dict[tuple[int, str], c_void_p] = {}
_lock = threading.Lock()


def load(path: Path, device: Device) -> tuple[Driver, c_void_p]:
    """The driver and the module of a compiled file on a device; once a process for its bytes, and for good: a captured
    graph may hold its kernels. Raises KernelError."""
    assert device.index is not None
    by = driver.of_vendor(device.vendor)
    image = binary.unbundled(path.read_bytes(), device.arch, path)
    at = (device.index, hashlib.sha256(image).hexdigest())
    with _lock, by.on(device.index):
        if at not in _modules:
            by.bind(device.index)
            _modules[at] = by.load(image, f"{path} for {device.name}")
        return by, _modules[at]


class _Local(threading.local):
    arguments: Arguments | None = None


class _Launch:
    """The sizes and the stream of a launch as they were given, and `words`, what the driver's function takes first."""

    __slots__ = ("block", "grid", "shared", "stream", "words")

    def __init__(self, grid: Any, block: Any, shared: int, stream: int, words: tuple[Any, ...]):
        self.grid, self.block, self.shared, self.stream, self.words = grid, block, shared, stream, words


class LoadedKernel:
    """A kernel on a device. names: of the parameters, for messages. name: in the file; shown: as the program has it."""

    def __init__(
        self, path: Path, device: Device, name: str, shown: str, names: Sequence[str], parameters: Sequence[Parameter]
    ):  # fmt: skip
        assert device.index is not None
        self.device, self.index, self.shown = device, device.index, shown
        self.names, self.parameters = tuple(names), tuple(parameters)
        self.driver, module = load(path, device)
        self.function = self.driver.function(module, name, str(path))
        self.threads = self.driver.attribute(self.function, driver.MAX_THREADS)
        self.static_shared = self.driver.attribute(self.function, driver.STATIC_SHARED)
        self._most_shared = 0
        self._last = _Launch(None, None, 0, 0, ())
        self._local = _Local()

    def launch(self, grid: Any, block: Any, values: Sequence[Any], shared: int, stream: Any) -> None:
        """Launch it on `stream`, or on torch's current one. Raises ArgumentError and KernelError; nothing ran then."""
        arguments = self._local.arguments or self._bound()
        if len(values) != len(self.names):
            raise ArgumentError(self._count(len(values)))
        arguments.write(values)
        by, index = self.driver, self.index
        if by.current_device() != index:
            with by.on(index):
                self.launch(grid, block, values, shared, stream)
            return
        at = by.current_stream(index) if stream is None else pointer_of(stream)
        last = self._last
        try:
            same = grid == last.grid and block == last.block and shared == last.shared and at == last.stream
        except (ValueError, RuntimeError):  # arrays, whose comparison has no truth value, and which are refused below
            same = False
        if not same:
            last = self._prepared(grid, block, shared, at)
        if status := by.launch(*last.words, arguments.addresses, None):
            by.check(status, f"{self.shown} was not launched with grid {grid}, block {block}")

    def _prepared(self, grid: Any, block: Any, shared: int, stream: int) -> _Launch:
        """A launch of these sizes, checked, which is remembered. Raises ArgumentError."""
        words = self.driver.launch_words(self.function, self._checked(grid, block, shared), c_void_p(stream))
        if isinstance(grid, (list, tuple)) and isinstance(block, (list, tuple)):
            self._last = _Launch(grid[:], block[:], shared, stream, words)
            return self._last
        return _Launch(grid, block, shared, stream, words)

    def _bound(self) -> Arguments:
        """This thread's memory for arguments; on this device it has the device's context from now on."""
        with self.driver.on(self.index):
            self.driver.bind(self.index)
        made = Arguments(self.names, self.parameters, self.index, self.device.name)
        self._local.arguments = made
        return made

    def _count(self, given: int) -> str:
        names = ", ".join(self.names)
        return f"{self.shown} takes {len(self.names)} arguments after grid and block ({names}), not {given}"

    def _checked(self, grid: Any, block: Any, shared: Any) -> driver.Sizes:
        """The sizes of a launch. Raises ArgumentError where they are beyond the device's."""
        sizes = (*three(grid, GRID, f"{self.shown}: grid"), *three(block, BLOCK, f"{self.shown}: block"))
        threads = sizes[3] * sizes[4] * sizes[5]
        if threads > self.threads:
            raise ArgumentError(
                f"{self.shown}: a block of {threads} threads is more than the {self.threads} that this kernel can have "
                f"on {self.device.name}: make it smaller, or compile it with __launch_bounds__({threads})"
            )
        if type(shared) is not int or shared < 0:
            raise ArgumentError(f"{self.shown}: shared is {shared!r}, and it is a number of bytes")
        facts = self.device.facts
        if facts is not None and shared + self.static_shared > facts.block_shared:
            raise ArgumentError(
                f"{self.shown}: {shared} bytes of shared memory beside the kernel's own {self.static_shared} are more "
                f"than the {facts.block_shared} that a block can have on {self.device.arch}"
            )
        if shared > self._most_shared:
            self.driver.allow_shared(self.function, shared)
            self._most_shared = shared
        return *sizes, shared


def three(sizes: Any, most: tuple[int, int, int], what: str) -> tuple[int, int, int]:
    """Three sizes from one to three of them. Raises ArgumentError for others, 0, or more than the device's."""
    given = (sizes,) if isinstance(sizes, int) else sizes
    if not isinstance(given, (list, tuple)) or not 1 <= len(given) <= 3 or any(type(one) is not int for one in given):
        raise ArgumentError(f"{what} is {sizes!r:.80}, and it is one to three ints, such as [1024] or [32, 8]")
    made = (*given, 1, 1)[:3]
    for axis, size, limit in zip("xyz", made, most, strict=True):
        if not 1 <= size <= limit:
            raise ArgumentError(f"{what} is {size} in {axis}, and it is from 1 to {limit}")
    return made[0], made[1], made[2]


def pointer_of(stream: Any) -> int:
    """A stream as a C pointer: torch's, or its number. Raises ArgumentError for anything else."""
    found = getattr(stream, "cuda_stream", stream)
    if type(found) is not int:
        raise ArgumentError(f"stream is {stream!r:.80}: give a torch.cuda.Stream, its cuda_stream, or None")
    return found


def current() -> Device:
    """Torch's current GPU. Raises KernelError where there is none."""
    from accelpatch.device import probe

    if not torch.cuda.is_available():
        raise KernelError("there is no GPU here: name an arch, such as gfx942 or sm_90")
    return probe("cuda")
