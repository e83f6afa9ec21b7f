"""The arguments of a launch: checked against a kernel's parameters, and written to memory that the driver reads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_uint16, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import ArgumentError
from accelpatch.kernels.compiling.parameters import (
    DTYPES,
    FLOAT,
    INTEGER,
    POINTER,
    POINTER_BYTES,
    UNKNOWN,
    VALUE,
    Parameter,
    say,
)

WIDE = (1 << 64) - 1


class Slot:
    """A parameter of a kernel with 8 bytes of memory for its argument. name: in messages."""

    def __init__(self, name: str, parameter: Parameter, where: Any):
        self.name, self.parameter, self.where = name, parameter, where
        self.takes_tensor = parameter.kind in (POINTER, UNKNOWN) and parameter.size in (0, POINTER_BYTES)
        self.dtype: torch.dtype | None = getattr(torch, parameter.dtype) if parameter.dtype else None
        self.low, self.high = _bounds(parameter)
        of_size: Any = {4: c_float, 8: c_double}.get(parameter.size) if parameter.kind == FLOAT else None
        #: the memory as a C float; None for a parameter of another type
        self.real: c_float | c_double | None = of_size.from_buffer(where) if of_size else None

    def number(self, value: Any) -> None:
        """Write an argument that is no tensor. Raises ArgumentError where it does not fit."""
        kind, size = self.parameter.kind, self.parameter.size
        if isinstance(value, torch.dtype) or not isinstance(value, (int, float, type(None))) or kind == VALUE:
            raise ArgumentError(f"{self.name} is {_say_value(value)}, and the kernel's is {say(self.parameter)}")
        if value is None or kind == POINTER:
            if not self.takes_tensor or isinstance(value, (float, bool)) or not 0 <= (value or 0) <= WIDE:
                raise ArgumentError(f"{self.name} is {value!r}, and the kernel's is {say(self.parameter)}: {POINTERS}")
            self.where.value = value or 0
        elif self._is_float(value):
            self._write_float(float(value), size or DTYPES.get(self.parameter.dtype, (FLOAT, 8))[1])
        elif isinstance(value, float):
            raise ArgumentError(f"{self.name} is {value!r}, and the kernel's is {say(self.parameter)}: give an int")
        elif not self.low <= value <= self.high:
            raise ArgumentError(f"{self.name} is {value}, which does not fit {say(self.parameter)}")
        else:
            self.where.value = value

    def _is_float(self, value: float) -> bool:
        """Whether a number is written as a float. Where the file does not give the type, an int may be an address."""
        return self.parameter.kind == FLOAT or (self.parameter.kind == UNKNOWN and isinstance(value, float))

    def _write_float(self, value: float, size: int) -> None:
        if size == 4:
            c_float.from_buffer(self.where).value = value
        elif size == 8:
            c_double.from_buffer(self.where).value = value
        elif size == 2 and self.dtype in (torch.float16, torch.bfloat16):
            bits = torch.tensor(value, dtype=self.dtype).view(torch.int16).item()
            c_uint16.from_buffer(self.where).value = int(bits)
        else:
            raise ArgumentError(
                f"{self.name} is {value}, and the kernel's has {size} bytes: annotate it, such as "
                f"{self.name}: torch.float16, or pass a tensor"
            )

    def refuse(self, tensor: Tensor, index: int, device: str) -> ArgumentError:
        """Why a tensor cannot be this argument."""
        if not self.takes_tensor:
            return ArgumentError(f"{self.name} is a tensor, and the kernel's is {say(self.parameter)}")
        if tensor.get_device() != index or tensor.layout != torch.strided:
            return ArgumentError(f"{self.name} lies on {tensor.device}, and the kernel runs on {device}: move it")
        if self.dtype is not None and tensor.dtype is not self.dtype:
            return ArgumentError(f"{self.name} is {tensor.dtype}, and it is annotated as {self.dtype}: convert it")
        return ArgumentError(
            f"{self.name} is not contiguous (its strides are {tensor.stride()}): call contiguous(), or pass its "
            "data_ptr() and its strides"
        )


POINTERS = "give a tensor, its data_ptr(), or None for NULL"


def _bounds(parameter: Parameter) -> tuple[int, int]:
    """The least and the largest int that an argument may be; none for a parameter that is no integer."""
    if parameter.kind == POINTER:
        return 0, WIDE
    if parameter.kind not in (INTEGER, UNKNOWN):
        return 1, 0
    bits = 8 * (parameter.size or 8)
    signed = parameter.signed
    if parameter.dtype:
        signed = not parameter.dtype.startswith("u")
    return 0 if signed is False else -(1 << bits - 1), (1 << bits - (signed is True)) - 1


def _say_value(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


class Arguments:
    """Memory for the arguments of one thread's launches. addresses: of each, as a driver reads them."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Parameter], index: int, device: str):
        self.index, self.device = index, device
        self.memory = (c_uint64 * max(1, len(parameters)))()
        places = [c_uint64.from_buffer(self.memory, 8 * at) for at in range(len(parameters))]
        self.slots = [Slot(*one) for one in zip(names, parameters, places, strict=True)]
        self.addresses = (c_void_p * max(1, len(parameters)))(*map(ctypes.addressof, places))
        self._quick = _quick(self.slots, index, self.memory)

    def write(self, values: Sequence[Any]) -> None:
        """Check arguments, as many as there are slots, and write them. Raises ArgumentError."""
        if not self._quick(values):
            for slot, value in zip(self.slots, values, strict=True):
                if isinstance(value, Tensor):
                    self._tensor(slot, value)
                else:
                    slot.number(value)

    def _tensor(self, slot: Slot, value: Tensor) -> None:
        fits = slot.takes_tensor and value.get_device() == self.index and slot.dtype in (None, value.dtype)
        if not fits or not value.is_contiguous():
            raise slot.refuse(value, self.index, self.device)
        slot.where.value = value.data_ptr()


def _quick(slots: Sequence[Slot], index: int, memory: Any) -> Callable[[Sequence[Any]], bool]:
    """A function that writes arguments of the usual types in one call of `struct`, and else returns False.

    Usual are a contiguous tensor for a pointer, an int for an integer and a float for a float. The function is compiled
    from Python source with a comparison for each argument: a loop over the slots would take twice as long, and a launch
    has a few microseconds in all.
    """
    names = [f"a{at}" for at in range(len(slots))]
    usual = [_usual(name, slot) for name, slot in zip(names, slots, strict=True)]
    form = "=" + "".join(code for code, _, _ in usual)
    tests, made = " and ".join(test for _, test, _ in usual), ", ".join(value for _, _, value in usual)
    known: dict[str, Any] = {f"{name}_dtype": slot.dtype for name, slot in zip(names, slots, strict=True)}
    lines = f"""
def quick(values):
    {"".join(f"{name}, " for name in names) or "()"} = values
    if {tests or "True"}:
        try:
            pack(memory, 0, {made})
        except errors:
            return False
        return True
    return False
"""
    known |= {"Tensor": Tensor, "index": index, "memory": memory, "pack": struct.Struct(form).pack_into}
    known["errors"] = (struct.error, OverflowError)
    exec(lines, known)
    made_of_text: Callable[[Sequence[Any]], bool] = known["quick"]
    return made_of_text


def _usual(name: str, slot: Slot) -> tuple[str, str, str]:
    """For an argument's usual type: its code in `struct`, padded to 8 bytes; the test for it; and the value to pack."""
    kind, size = slot.parameter.kind, slot.parameter.size
    if slot.takes_tensor:
        of_dtype = f" and {name}.dtype is {name}_dtype" if slot.dtype else ""
        here = f"{name}.get_device() == index{of_dtype} and {name}.is_contiguous()"
        return "Q", f"type({name}) is Tensor and {here}", f"{name}.data_ptr()"
    if kind == FLOAT and size in (4, 8):
        return "f4x" if size == 4 else "d", f"type({name}) is float", name
    if kind == INTEGER and slot.low <= slot.high:
        return "q" if slot.low else "Q", f"type({name}) is int and {slot.low} <= {name} <= {slot.high}", name
    return "8x", "False", "0"
