"""Reads compiled kernels: which there are in a file, for which arch, and their parameters.

AMD's code objects and assembly say it in their metadata (LLVM's "User Guide for AMDGPU Backend", code object V3 and
later), cubins in the sections .nv.info of each kernel, PTX in its text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch.device import nvidia_arch
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import msgpack
from accelpatch.kernels.compiling.parameters import FLOAT, INTEGER, POINTER, POINTER_BYTES, UNKNOWN, VALUE, Parameter

ELF, BUNDLE = b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__"
AMD_NOTE = 32  # NT_AMDGPU_METADATA
KPARAM_INFO, WITH_SIZE = 0x17, 0x04  # an attribute of .nv.info, and the form of those that have a size
NEW_FLAGS = 8  # the ABI version from which on a cubin's flags have its arch in the second byte


@dataclass(frozen=True)
class Binary:
    """arch: which it was compiled for; PTX of an arch runs on later ones too. kernels: name as in the file ->
    parameters; None where the file does not say them."""

    arch: str
    kernels: Mapping[str, tuple[Parameter, ...] | None]

    def name_of(self, wanted: str, file: Path) -> str:
        """The name in the file of the kernel that a program calls `wanted`: itself, or mangled by C++. Raises
        KernelError where there is none, with those that there are, or several."""
        mangled = f"_Z{len(wanted)}{wanted}"
        found = [wanted] if wanted in self.kernels else [name for name in self.kernels if name.startswith(mangled)]
        if len(found) == 1:
            return found[0]
        if found:
            raise KernelError(f'{file} has several kernels {wanted} ({", ".join(found)}): declare one extern "C"')
        names = ", ".join(self.kernels) or "none"
        raise KernelError(
            f"{file} has no kernel {wanted}; it has: {names}. A template has no name of its own: instantiate it in an "
            'extern "C" __global__ function'
        )


def read(path: Path, arch: str = "") -> Binary:
    """What is in a compiled file (.co, .cubin, .ptx, .s). arch: which one is wanted of a bundle of several. Raises
    KernelError for a file that is none of these."""
    data = path.read_bytes()
    try:
        if path.suffix == ".ptx":
            return _of_ptx(data.decode())
        if path.suffix == ".s":
            return _of_assembly(data.decode())
        data = unbundled(data, arch, path)
        return _of_cubin(data) if path.suffix == ".cubin" else _of_code_object(data)
    except (ValueError, struct.error, IndexError, KeyError, StopIteration) as error:
        raise KernelError(f"{path} is no {path.suffix} file, or it is damaged ({error!r}): compile it again") from error


def unbundled(data: bytes, arch: str, path: Path) -> bytes:
    """The code object for an arch of a bundle, as `hipcc --genco` writes it; other data as it is."""
    if not data.startswith(BUNDLE):
        return data
    (count,), at, there = struct.unpack_from("<Q", data, len(BUNDLE)), len(BUNDLE) + 8, []
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", data, at)
        target = data[at + 24 : at + 24 + length].decode()
        at += 24 + length
        name = target.rpartition("--")[2].partition(":")[0]
        if name == arch and size:
            return data[offset : offset + size]
        there += [name] if size else []
    raise KernelError(f"{path} is for {', '.join(there)}, not for {arch}: compile it for this GPU")


def _of_ptx(text: str) -> Binary:
    (target,) = re.findall(r"^\s*\.target\s+(sm_\w+)", text, re.MULTILINE)
    kernels = {}
    for name, inside in re.findall(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?", text, re.DOTALL):
        kernels[name] = tuple(_of_ptx_type(one) for one in re.findall(r"\.param\s+([^,]+)", inside))
    return Binary(target, kernels)


def _of_ptx_type(text: str) -> Parameter:
    """`.u64 .ptr .align 1 name`, `.f32 name`, `.align 4 .b8 name[8]`."""
    form, bits = re.findall(r"\.([usfb])(8|16|32|64)\b", text)[0]
    size = int(bits) // 8
    if count := re.search(r"\[(\d+)\]", text):
        return Parameter(VALUE, size * int(count[1]))
    integer = form in "su" and size < POINTER_BYTES  # nvcc writes int as .u32 too, and addresses as .u64
    kind = POINTER if ".ptr" in text else FLOAT if form == "f" else INTEGER if integer else UNKNOWN
    return Parameter(kind, size)


def _of_assembly(text: str) -> Binary:
    """Of the YAML at the end of AMD assembly, in the form in which LLVM writes it."""
    lines = text[text.index("amdhsa.kernels:") :].splitlines()
    kernels: dict[str, tuple[Parameter, ...] | None] = {}
    sizes: list[tuple[str, int]] = []
    seen, size, args = False, 0, False
    arch = next(re.finditer(r"amdhsa\.target:\s*['\"]?amdgcn-amd-amdhsa-\w*-(\w+)", text))[1]
    for line in lines:
        if re.match(r"  - ", line):
            sizes, seen = [], False
        key, _, value = line.strip().removeprefix("- ").partition(":")
        value = value.strip().strip("'\"")
        args = (args or key == ".args") and (line.startswith("      ") or key == ".args")
        seen |= key == ".args"
        if args and key == ".size":
            size = int(value)
        elif args and key == ".value_kind":
            sizes.append((value, size))
        elif not args and key == ".name":
            kernels[value] = tuple(_of_amd(*one) for one in sizes if not one[0].startswith("hidden")) if seen else None
    return Binary(arch, kernels)


def _of_amd(kind: str, size: int) -> Parameter:
    if kind != "by_value":
        return Parameter(POINTER, POINTER_BYTES)
    return Parameter(UNKNOWN if size in (1, 2, 4, 8) else VALUE, size)


def _of_code_object(data: bytes) -> Binary:
    note = next(words for kind, words in _notes(data) if kind == AMD_NOTE)
    facts: Any = msgpack.unpack(note)
    kernels = {
        one[".name"]: tuple(
            _of_amd(arg[".value_kind"], arg[".size"])
            for arg in one.get(".args", ()) if not arg[".value_kind"].startswith("hidden")
        )
        for one in facts["amdhsa.kernels"]
    }  # fmt: skip
    return Binary(facts["amdhsa.target"].rpartition("-")[2].partition(":")[0], kernels)


def _of_cubin(data: bytes) -> Binary:
    (flags,) = struct.unpack_from("<I", data, 48)
    number = flags >> 8 & 0xFF if data[8] >= NEW_FLAGS else flags & 0xFF
    kernels = {}
    for name, inside in _sections(data):
        if name.startswith(".nv.info."):
            sizes = dict(_kernel_parameters(inside))
            kernels[name.removeprefix(".nv.info.")] = tuple(
                Parameter(UNKNOWN if sizes[at] in (1, 2, 4, 8) else VALUE, sizes[at]) for at in range(len(sizes))
            )
    return Binary(nvidia_arch(number), kernels)


def _kernel_parameters(info: bytes) -> Iterator[tuple[int, int]]:
    """(place, bytes) of each parameter in a section .nv.info."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != WITH_SIZE:
            continue
        if attribute == KPARAM_INFO:
            _, place, _, packed = struct.unpack_from("<IHHI", info, at)
            yield place, packed >> 18
        at += size


def _elf(data: bytes) -> None:
    if not data.startswith(ELF):
        raise ValueError("it is no ELF file")


def _sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each section of a 64-bit ELF file."""
    _elf(data)
    (start,), (count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQ", data, start + 64 * at) for at in range(count)]
    for header in headers:
        begin = headers[names][4] + header[0]
        yield data[begin : data.index(b"\0", begin)].decode(), data[header[4] : header[4] + header[5]]


def _notes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, description) of each note in the program headers of a 64-bit ELF file."""
    _elf(data)
    (start,), (step, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    for at in range(start, start + step * count, step):
        (kind,), (offset,), (size,) = (struct.unpack_from(f, data, at + place) for f, place in
                                       (("<I", 0), ("<Q", 8), ("<Q", 32)))  # fmt: skip
        while kind == 4 and size >= 12:
            name, words, note = struct.unpack_from("<III", data, offset)
            begin = offset + 12 + (name + 3 & ~3)
            yield note, data[begin : begin + words]
            step_over = 12 + (name + 3 & ~3) + (words + 3 & ~3)
            offset, size = offset + step_over, size - step_over
