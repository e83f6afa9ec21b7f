"""Launches code objects on AMD GPUs through the HIP runtime that torch has loaded, by ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

from accelpatch.errors import KernelError

#: HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END: keys of ``extra`` of hipModuleLaunchKernel
_BUFFER, _SIZE, _END = 1, 2, 3


@functools.cache
def runtime() -> ctypes.CDLL:
    """libamdhip64, preferably torch's own. Raises KernelError where there is none."""
    import torch

    of_torch = Path(torch.__file__).parent / "lib" / "libamdhip64.so"
    for name in (str(of_torch), "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise KernelError("there is no libamdhip64.so here: install a ROCm build of torch, or pass device='emulate'")


def arch_of_device() -> str:
    """The arch of torch's current GPU. Raises KernelError where that is not an AMD GPU."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        raise KernelError("torch has no AMD GPU here: pass device='emulate' to run the kernel in the emulator")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(properties.gcnArchName).partition(":")[0]


def _call(name: str, *arguments: object) -> None:
    library = runtime()
    status = getattr(library, name)(*arguments)
    if status:
        say = library.hipGetErrorString
        say.restype = ctypes.c_char_p
        raise KernelError(f"{name} failed: {say(status).decode()} ({status})")


@functools.cache
def _function(code: bytes, name: str, device: int) -> ctypes.c_void_p:
    """A kernel of a code object, loaded on a device once per process."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("hipModuleLoadData", ctypes.byref(module), code)
    _call("hipModuleGetFunction", ctypes.byref(function), module, name.encode())
    return function


def launch(
    code: bytes, name: str, grid: Sequence[int], block: Sequence[int], arguments: bytes, *, stream: int | None = None
) -> None:
    """Start a kernel on torch's current device and, unless another is given, its current stream.

    grid: workgroups, block: threads of a workgroup, three sizes each. arguments: the kernarg segment. Raises
    KernelError with the runtime's message.
    """
    import torch

    device = torch.cuda.current_device()
    queue = torch.cuda.current_stream().cuda_stream if stream is None else stream
    function = _function(code, name, device)
    buffer, size = ctypes.create_string_buffer(arguments, max(1, len(arguments))), ctypes.c_size_t(len(arguments))
    extra = (ctypes.c_void_p * 5)(
        _BUFFER, ctypes.cast(buffer, ctypes.c_void_p), _SIZE, ctypes.cast(ctypes.byref(size), ctypes.c_void_p), _END
    )
    _call("hipModuleLaunchKernel", function, *map(ctypes.c_uint, (*grid, *block)), ctypes.c_uint(0),
          ctypes.c_void_p(queue), None, extra)  # fmt: skip
