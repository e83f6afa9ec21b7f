"""A function of a shared library that was compiled from a C++ file, called on tensors of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import c_double, c_float, c_uint64
from pathlib import Path
from typing import Any

from accelpatch.errors import ArgumentError, KernelError
from accelpatch.kernels.compiling.arguments import Arguments
from accelpatch.kernels.compiling.entries import shared_library
from accelpatch.kernels.compiling.parameters import FLOAT, UNKNOWN, Parameter


class _Local(threading.local):
    arguments: Arguments | None = None


class HostFunction:
    """An `extern "C"` function of a library. Integers and pointers go in registers of 8 bytes, floats as they are."""

    def __init__(self, path: Path, name: str, names: Sequence[str], parameters: Sequence[Parameter]):
        self.name, self.names, self.parameters = name, tuple(names), tuple(parameters)
        for parameter, one in zip(parameters, names, strict=True):
            if parameter.kind == UNKNOWN and not parameter.dtype:
                raise ArgumentError(f"the type of {name}'s {one} is not known: annotate it in the Python function")
        try:
            self.function = getattr(shared_library(path), name)
        except OSError as error:
            raise KernelError(f"{path} does not load ({error}): define all that it uses") from error
        except AttributeError:
            raise KernelError(f'{path} has no function {name}: declare it extern "C", and not static') from None
        reals = {4: c_float, 8: c_double}
        self.function.argtypes = [
            reals[one.size] if one.kind == FLOAT and one.size in reals else c_uint64 for one in parameters
        ]
        self.function.restype = None
        self._local = _Local()

    def call(self, values: Sequence[Any]) -> None:
        """Call it. Raises ArgumentError for arguments that do not fit."""
        if len(values) != len(self.names):
            names = ", ".join(self.names)
            raise ArgumentError(f"{self.name} takes {len(self.names)} arguments ({names}), not {len(values)}")
        arguments = self._local.arguments
        if arguments is None:
            arguments = self._local.arguments = Arguments(self.names, self.parameters, -1, "the CPU")
        arguments.write(values)
        memory = arguments.memory
        self.function(*[memory[at] if one.real is None else one.real.value for at, one in enumerate(arguments.slots)])
