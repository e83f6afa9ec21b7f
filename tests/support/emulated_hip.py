"""A HIP library of the project's, host side and all, whose launches run in the emulator of accelpatch.jit."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.jit.emulate import run
from accelpatch.jit.emulate.arguments import metadata_of
from accelpatch.jit.emulate.assembly import parse
from accelpatch.kernels.hip import binding
from tests.support import amdgcn
from tests.support.hip_gemv import Library, Packed

MULTIPROCESSORS = 63  # hipDeviceAttributeMultiprocessorCount
_WORDS = ctypes.POINTER(ctypes.c_uint32)
_LAUNCH = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, _WORDS, _WORDS, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
)  # fmt: skip


@functools.cache
def _library(arch: str, source: str) -> ctypes.CDLL:
    """The host side of a HIP source, linked with hip_runtime.cpp."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "library.so"
        command = [one for one in amdgcn.command(arch) if one not in ("--cuda-device-only", "-S")]
        flags = ["--cuda-host-only", "-nogpulib", "-fPIC", "-shared", f"-DMULTIPROCESSORS={MULTIPROCESSORS}"]
        runtime = Path(__file__).with_name("hip_runtime.cpp")
        files = [str(amdgcn.ROOT / source), "-x", "c++", str(runtime)]
        subprocess.run([*command, *flags, *files, "-o", str(out)], check=True)
        return ctypes.CDLL(str(out))


class Launches:
    """The library, and what its launches were: (kernel, grid, block). An error of a launch is kept in `error`."""

    def __init__(self, arch: str, source: str, memory: Sequence[Any], seed: int) -> None:
        self.arch, self.memory, self.seed = arch, memory, seed
        self.assembly = amdgcn.compiled(arch, source)
        self.library = _library(arch, source)
        self.found: list[tuple[str, list[int], list[int]]] = []
        self.error: BaseException | None = None

    def __call__(self, kernel: bytes, grid: Any, block: Any, arguments: Any, shared: int) -> None:
        try:
            self._run(kernel.decode(), grid[:3], block[:3], arguments, shared)
        except BaseException as error:  # noqa: BLE001, C lets none through
            self.error = error

    def _run(self, kernel: str, grid: list[int], block: list[int], arguments: Any, shared: int) -> None:
        metadata = metadata_of(parse(self.assembly).metadata, kernel)
        assert metadata is not None
        shown = [one for one in metadata.arguments if not one.hidden]
        given = [("by_value", ctypes.string_at(arguments[at], one.size)) for at, one in enumerate(shown)]
        self.found.append((kernel, grid, block))
        run(
            self.assembly, kernel, grid, block, given, arch=self.arch, shared=shared, memory=self.memory, strict=False,
            seed=self.seed,
        )  # fmt: skip


@contextmanager
def launches(arch: str, source: str, memory: Sequence[Any], seed: int = 0) -> Iterator[Launches]:
    """While it lasts, the library's launches run in the emulator; memory: the tensors that they may touch."""
    made = Launches(arch, source, memory, seed)
    function = _LAUNCH(made)
    made.library.set_launch(function)
    yield made
    made.library.set_launch(_LAUNCH())
    if made.error is not None:
        raise made.error


class AssemblyEmulated(Library):
    """The products of an arch as clang compiled them; launches: how many there were."""

    def __init__(self, arch: str, seed: int = 0) -> None:
        super().__init__(Path())
        self.arch, self.seed, self.launches = arch, seed, 0
        self.memory: list[Tensor] = []

    def call(self, p: Packed, x: Tensor, y: Tensor, **rest: Any) -> None:
        found = [p.w, p.scale, p.offset, x, y, *rest.values()]
        self.memory = [one for one in found if torch.is_tensor(one)]
        super().call(p, x, y, **rest)

    def _launch(self, p: Packed, args: binding.GemvArgs, half: int) -> None:
        name = p.format.library
        extra = [] if p.format.argument is None else [p.format.argument]
        with launches(self.arch, f"accelpatch/kernels/hip/gemv/{name}.hip", self.memory, self.seed) as made:
            function = binding.declared(made.library, f"accelpatch_{name}")
            binding.check(function(ctypes.byref(args), half, *extra, None), name)
        self.launches += len(made.found)
