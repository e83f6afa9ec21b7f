"""The calls of a GPU's driver by which a compiled file is loaded and its kernels are launched: CUDA's and HIP's.

Both have the same functions under two names. Torch has loaded the library, and made the device's context, before.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from accelpatch.errors import KernelError

LOG_BYTES = 8192
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER and its size: options of cuModuleLoadDataEx
MAX_THREADS, STATIC_SHARED = 0, 1  # attributes of a function, numbered alike
MAX_DYNAMIC_SHARED = 8  # NVIDIA: to be raised for more than 48 KiB
WITHOUT_ASKING = 48 << 10


Sizes = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Names:
    """A driver's functions, and its library where torch has not loaded it. shared: sets the most shared memory.
    launch_config: a function that launches by a structure, where the driver is new enough to have it."""

    vendor: str
    library: tuple[str, ...]
    load: str
    function: str
    attribute: str
    launch: str
    error: str
    shared: str = ""
    launch_config: str = ""
    context: str = ""


NAMES = {
    "nvidia": Names(
        "nvidia", ("libcuda.so.1",), "cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute",
        "cuLaunchKernel", "cuGetErrorString", shared="cuFuncSetAttribute",
        launch_config="cuLaunchKernelEx", context="cuDevicePrimaryCtxRetain",
    ),
    "amd": Names(
        "amd", ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"), "hipModuleLoadData",
        "hipModuleGetFunction", "hipFuncGetAttribute", "hipModuleLaunchKernel", "hipGetErrorString",
    ),
}  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig: sizes, a stream, and no attributes."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint),
    )  # fmt: skip


class Driver:
    """A vendor's driver. launch: its C function, (*launch_words, addresses of the arguments, NULL) -> status. Ints of
    Python are C ints to it and pointers are ctypes objects, made before: with declared types each call would convert
    all of them, which takes longer than the rest of it."""

    def __init__(self, names: Names, library: ctypes.CDLL):
        self.names, self.library = names, library
        self._config = bool(names.launch_config) and hasattr(library, names.launch_config)
        self.launch = getattr(library, names.launch_config if self._config else names.launch)
        # Torch's current device, whose context it has made: there is a tensor on it; and its current stream on one, as
        # a C pointer. They are torch's own functions, as a method around each would cost a launch more than they take.
        self.current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream)

    def launch_words(self, function: c_void_p, sizes: Sizes, stream: c_void_p) -> tuple[Any, ...]:
        """What `launch` takes first, for a kernel: grid x, y, z, block x, y, z, bytes of shared memory, and a stream.
        A structure that is written once costs each launch less than nine numbers."""
        return (byref(_Config(*sizes, stream)), function) if self._config else (function, *sizes, stream)

    def bind(self, index: int) -> None:
        """Make a device's context this thread's, which launches on another than torch's threads may not have."""
        if not self.names.context:
            self.check(self.library.hipSetDevice(index), "the device is not there")
            return
        context, device = c_void_p(), c_int()
        self.check(self.library.cuDeviceGet(byref(device), index), "the device is not there")
        self.check(getattr(self.library, self.names.context)(byref(context), device), "the device has no context")
        self.check(self.library.cuCtxSetCurrent(context), "the device has no context")

    def load(self, image: bytes, what: str) -> c_void_p:
        """A module of a compiled file's bytes. Raises KernelError; for PTX with the driver's lines."""
        module, log, data = c_void_p(), ctypes.create_string_buffer(LOG_BYTES), ctypes.create_string_buffer(image)
        load = getattr(self.library, self.names.load)
        if self.names.vendor == "nvidia":
            options = (c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
            values = (c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
            status = load(byref(module), data, c_uint(2), options, values)
        else:
            status = load(byref(module), data)
        said = log.value.decode(errors="replace").strip()
        self.check(status, f"{what} was not loaded" + (f":\n{said}\n" if said else ""))
        return module

    def function(self, module: c_void_p, name: str, what: str) -> c_void_p:
        """A kernel of a module, by its name in the file."""
        found = c_void_p()
        status = getattr(self.library, self.names.function)(byref(found), module, name.encode())
        self.check(status, f"{what} has no kernel {name}")
        return found

    def attribute(self, function: c_void_p, which: int) -> int:
        """MAX_THREADS or STATIC_SHARED of a kernel."""
        value = c_int()
        status = getattr(self.library, self.names.attribute)(byref(value), which, function)
        self.check(status, "the kernel's limits are not known")
        return value.value

    def allow_shared(self, function: c_void_p, size: int) -> None:
        """Let launches of a kernel have so many bytes of dynamic shared memory."""
        if self.names.shared and size > WITHOUT_ASKING:
            status = getattr(self.library, self.names.shared)(function, MAX_DYNAMIC_SHARED, c_int(size))
            self.check(status, f"{size} bytes of shared memory are more than a block can have here")

    def check(self, status: int, what: str) -> None:
        """Raise KernelError where a call failed, with the driver's words."""
        if status:
            raise KernelError(f"{what}: {self._words(status)} (error {status})")

    def _words(self, status: int) -> str:
        of_status = getattr(self.library, self.names.error)
        if self.names.vendor == "amd":
            of_status.restype = c_char_p
            return (of_status(status) or b"unknown").decode()
        text = c_char_p()
        of_status.argtypes = [c_int, POINTER(c_char_p)]
        of_status(status, byref(text))
        return (text.value or b"unknown").decode()

    def on(self, index: int) -> AbstractContextManager[Any]:
        """Context manager: a device is the current one."""
        return nullcontext() if self.current_device() == index else torch.cuda.device(index)


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


@functools.cache
def of_vendor(vendor: str) -> Driver:
    """The driver of "nvidia" or "amd". Raises KernelError where it is not here."""
    names = NAMES[vendor]
    errors = []
    for one in (*_loaded(names.library), *names.library):
        try:
            return Driver(names, ctypes.CDLL(one))
        except OSError as error:
            errors.append(str(error))
    raise KernelError(f"there is no driver of a GPU here ({'; '.join(errors)}): run it on a machine that has one")


def _loaded(names: Sequence[str]) -> list[str]:
    """Paths of a library that this process has loaded already, as torch does with a ROCm of its own."""
    stems = tuple(name.partition(".so")[0] for name in names)
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split(maxsplit=5)[5].strip() for line in file if line.count("/")}
    except OSError:
        return []
    return sorted(path for path in paths if path.rpartition("/")[2].partition(".so")[0] in stems)
