"""NVRTC, NVIDIA's compiler as a library: it compiles kernel files where there is no nvcc. Torch for CUDA brings it.

It takes device code alone, and knows CUDA's headers where a toolkit's or a Python package's include folder has them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from accelpatch.errors import KernelError
from accelpatch.kernels.compiling.source_file import SourceFile

#: form -> the functions that give its size and its bytes
_OUTPUTS = {".ptx": ("nvrtcGetPTXSize", "nvrtcGetPTX"), ".cubin": ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")}
_FLAGS = ("-std=c++17", "-default-device")


def _folders(inside: str) -> list[Path]:
    """Folders of this name in CUDA toolkits and in NVIDIA's Python packages."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(root) for root in (None if spec is None else spec.submodule_search_locations) or []]
    toolkits = [Path(root) for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    patterns = [(root, f"*/{inside}") for root in packages] + [(root, f"{inside}*") for root in toolkits]
    return sorted({found for root, pattern in patterns for found in root.glob(pattern) if found.is_dir()})


@functools.cache
def _library() -> ctypes.CDLL | None:
    """libnvrtc: torch's own, one of NVIDIA's Python packages, or the system's; None where there is none."""
    files = [file for folder in _folders("lib") for file in folder.glob("libnvrtc.so.*")]
    for name in (*map(str, files), "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def why_not() -> str | None:
    """Why NVRTC cannot be used; None where it can."""
    if _library() is None:
        return "libnvrtc is not here (torch for CUDA brings it: pip install nvidia-cuda-nvrtc)"
    return None


def identity() -> str:
    """The library's name and version, for the cache."""
    library = _library()
    assert library is not None
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    return f"NVRTC {major.value}.{minor.value} {library._name}"


def compiled(source: SourceFile, arch: str, form: str) -> bytes:
    """A kernel file as .ptx or .cubin. Raises KernelError with the compiler's lines."""
    library = _library()
    assert library is not None
    program = c_void_p()
    text = source.text().encode()
    _check(library, library.nvrtcCreateProgram(byref(program), text, str(source.path).encode(), 0, None, None))
    try:
        folders = [source.path.parent, *_folders("include")]
        options = [f"-arch={arch}", *_FLAGS, *source.flags, *(f"-I{folder}" for folder in folders)]
        words = (c_char_p * len(options))(*(one.encode() for one in options))
        if library.nvrtcCompileProgram(program, len(options), words):
            said = _text(library, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0")
            raise KernelError(f"{identity()} failed:\n{said.decode(errors='replace').strip()}")
        made = _text(library, program, *_OUTPUTS[form])
        return made.rstrip(b"\0") if form == ".ptx" else made
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _text(library: ctypes.CDLL, program: c_void_p, size_of: str, get: str) -> bytes:
    size = c_size_t()
    _check(library, getattr(library, size_of)(program, byref(size)))
    room = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, get)(program, room))
    return room.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = c_char_p
        raise KernelError(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")
