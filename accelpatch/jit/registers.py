"""The registers and arrays of registers that ``J.gpr`` returns: read in expressions, written by assigning elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from accelpatch.jit import types
from accelpatch.jit.expressions import Given, Node, constant
from accelpatch.jit.ir import Part, Register
from accelpatch.jit.location import fail
from accelpatch.jit.types import Type

#: emits the instructions that write an expression into registers
Assign = Callable[["Value", Node], None]


class Value(Node):
    """Registers of one file with a shape: an array, a part of one, or a single element, whose shape is (1,).

    ``x[i]`` is a part of the array, ``x[i] = expression`` writes it; an expression of one element is broadcast.
    """

    def __init__(self, register: Register, first: int, shape: tuple[int, ...], dtype: Type, assign: Assign):
        self.register, self.first, self.shape, self.type, self.assign = register, first, shape, dtype, assign
        self.file, self.count = register.file, math.prod(shape)

    @property
    def dwords(self) -> int:
        return self.count * self.type.dwords

    @property
    def part(self) -> Part:
        return Part(self.register, self.first, self.dwords)

    def dword(self, at: int) -> Value:
        """One of its 32-bit registers, as u32."""
        return Value(self.register, self.first + at, (1,), types.U32, self.assign)

    def element(self, at: int) -> Value:
        if self.count == 1:
            return self
        return Value(self.register, self.first + at * self.type.dwords, (1,), self.type, self.assign)

    def view(self, name: str) -> Value:
        """The same bits as elements of another type, in one dimension."""
        dtype = types.element(name)
        if self.dwords % dtype.dwords:
            fail(f"{self.dwords} registers are no whole number of {dtype}")
        return Value(self.register, self.first, (self.dwords // dtype.dwords,), dtype, self.assign)

    def __getitem__(self, at: Any) -> Value:
        first, shape = self._place(at if isinstance(at, tuple) else (at,))
        return Value(self.register, self.first + first * self.type.dwords, shape, self.type, self.assign)

    def __setitem__(self, at: Any, value: Given) -> None:
        self.assign(self[at], constant(value, self.type))

    def _place(self, at: tuple[Any, ...]) -> tuple[int, tuple[int, ...]]:
        """The first element and the shape of an indexed part."""
        if len(at) > len(self.shape):
            fail(f"{len(at)} indices for an array of shape {self.shape}")
        first, rest, sliced = 0, [], False
        for index, size in zip((*at, *[slice(None)] * (len(self.shape) - len(at))), self.shape, strict=True):
            if isinstance(index, slice):
                for part in (index.start, index.stop, index.step):
                    if not isinstance(part, int | None):
                        self._bad_index(part, size)
                start, stop, step = index.indices(size)
                if step != 1 or stop <= start or (sliced and (start, stop) != (0, size)):
                    fail(f"{index} is no run of neighbouring registers of {self.shape}")
                sliced = True
            elif isinstance(index, int) and -size <= index < size and not sliced:
                start, stop = index % size, index % size + 1
            else:
                self._bad_index(index, size)
            first = first * size + start
            rest += [stop - start] if isinstance(index, slice) else []
        return first, tuple(rest) or (1,)

    def _bad_index(self, index: object, size: int) -> None:
        if isinstance(index, Node):
            fail("registers have no addresses: an index of an array of registers must be known at compile time")
        fail(f"index {index!r} of a dimension of {size} elements, before any slice, must be an integer below it")
