"""A kernel's arguments: what the metadata says of them, their bytes, and the memory that they allow."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelpatch.jit.emulate.fault import EmulationError
from accelpatch.jit.emulate.memory import Memory

#: kinds of numbers that a caller may name -> struct format; all that is not here must be one of the metadata's kinds
FORMATS = {
    "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "f16": "<e",
    "f32": "<f", "f64": "<d", "char": "<b", "short": "<h", "int": "<i", "unsigned": "<I", "unsigned int": "<I",
    "long": "<q", "unsigned long": "<Q", "size_t": "<Q", "float": "<f", "double": "<d", "half": "<e",
}  # fmt: skip
POINTER, VALUE = "global_buffer", "by_value"


@dataclass(frozen=True)
class Argument:
    """Of the metadata. offset, size: bytes in the kernel arguments. kind: .value_kind."""

    name: str
    offset: int
    size: int
    kind: str

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class KernelMetadata:
    arguments: tuple[Argument, ...]
    size: int  # of all arguments, hidden ones too
    most_threads: int


def metadata_of(text: str, name: str) -> KernelMetadata | None:
    """What the metadata (YAML, of which this needs only the layout that compilers write) says of a kernel."""
    body = text.partition("amdhsa.kernels:")[2]
    for kernel in re.split(r"^  - ", body, flags=re.M)[1:]:
        kernel = re.split(r"^[a-z]", kernel, flags=re.M)[0]
        if re.search(rf"(?:\A|^ {{4}})\.name:\s+['\"]?{re.escape(name)}['\"]?\s*$", kernel, re.M):
            return _kernel(kernel)
    return None


def _kernel(text: str) -> KernelMetadata:
    found, listed = [], re.search(r"\.args:\s*\n((?:(?: {6}| {4}- ).*\n?)*)", text)
    for one in re.split(r"^ +- ", listed[1], flags=re.M)[1:] if listed else []:
        fields = {key: value.strip("'\"") for key, value in re.findall(r"\.(\w+):\s+(\S+)", one)}
        found.append(Argument(fields.get("name", ""), int(fields["offset"]), int(fields["size"]), fields["value_kind"]))
    return KernelMetadata(tuple(found), _field(text, "kernarg_segment_size"), _field(text, "max_flat_workgroup_size"))


def _field(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    return int(found[1]) if found else 0


def pack(
    metadata: KernelMetadata, given: Sequence[tuple[str, Any]], hidden: dict[str, int], memory: Memory
) -> bytearray:
    """The bytes of the kernel arguments; the memory of those that are tensors, arrays or addresses is allowed."""
    wanted = [one for one in metadata.arguments if not one.hidden]
    if len(wanted) != len(given):
        raise EmulationError(f"the kernel takes {len(wanted)} arguments, and {len(given)} were passed")
    size = max([metadata.size, *(one.offset + one.size for one in metadata.arguments)])
    made = bytearray(size)
    for number, (argument, (kind, value)) in enumerate(zip(wanted, given, strict=True)):
        name = argument.name or f"argument {number}"
        made[argument.offset : argument.offset + argument.size] = _bytes(argument, name, kind, value, memory)
    for argument in metadata.arguments:
        if argument.hidden:
            value = hidden.get(argument.kind.removeprefix("hidden_"), 0)
            made[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
    return made


def _bytes(argument: Argument, name: str, kind: str, value: Any, memory: Memory) -> bytes:
    if argument.kind == POINTER or kind == POINTER or kind.endswith("*"):
        return struct.pack("<Q", allow(name, value, memory))
    if kind in FORMATS:
        try:
            made = struct.pack(FORMATS[kind], value)
        except (struct.error, OverflowError) as error:
            raise EmulationError(f"{name} is {value!r}, which is no {kind}: {error}") from error
    elif kind != VALUE:
        raise EmulationError(
            f"{name} is of the unknown kind {kind!r}; known are {POINTER}, {VALUE}, {', '.join(FORMATS)}"
        )
    elif type(value) is int:
        made = (value & (1 << 8 * argument.size) - 1).to_bytes(argument.size, "little")
    elif type(value) is float:
        made = struct.pack({2: "<e", 4: "<f", 8: "<d"}.get(argument.size, "<d"), value)
    else:
        made = bytes(value)
    if len(made) != argument.size:
        raise EmulationError(f"{name} has {len(made)} bytes, and the kernel takes {argument.size}")
    return made


def allow(name: str, value: Any, memory: Memory) -> int:
    """The address of a tensor, an array or what lies at an address; its memory becomes the kernel's to use."""
    if type(value) is int:
        if value and memory.region(value, value + 1) is None:
            storage = _storage_at(name, value)
            memory.add(name, storage.data_ptr(), storage.nbytes(), storage)
        return value
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise EmulationError(
                f"{name} lies on {value.device}, and the emulator works on the CPU's memory: pass .cpu()"
            )
        extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
        memory.add(name, value.data_ptr(), extent * value.element_size() if value.numel() else 0, value)
        return int(value.data_ptr())
    if hasattr(value, "__array_interface__"):
        extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))
        memory.add(name, value.ctypes.data, extent + value.itemsize if value.size else 0, value, value.flags.writeable)
        return int(value.ctypes.data)
    if value is None:
        return 0
    raise EmulationError(f"{name} is {type(value).__name__}, and must be a tensor, an array or an address")


def _storage_at(name: str, address: int) -> Any:
    """The storage of a live CPU tensor that holds an address."""
    torch = sys.modules.get("torch")
    for one in gc.get_objects() if torch else []:
        # of its own classes alone: tensors that only stand for others, as compilers trace with, have no address
        if torch and type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu" and not one.is_sparse:
            storage = one.untyped_storage()
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return storage
    raise EmulationError(
        f"{name} is the address {address:#x}, which is in no live CPU tensor's memory: pass the tensor itself"
    )


class Buffer:
    """Memory of the emulator's own that a kernel may read: its arguments, constant data, the dispatch packet."""

    def __init__(self, name: str, data: bytes, memory: Memory) -> None:
        self.storage = (ctypes.c_uint8 * max(1, len(data))).from_buffer_copy(data or b"\0")
        self.address = ctypes.addressof(self.storage)
        memory.add(name, self.address, len(data), self.storage, writable=False)
