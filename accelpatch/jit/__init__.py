"""Kernels written in Python: a compiler to CDNA assembly, and an emulator that runs it where there is no GPU.

    @accelpatch.jit()
    def kernel(J, N, out: "int*"):
        ...

    kernel([1], [64], 32, tensor)

The module itself is callable: ``accelpatch.jit()`` and ``jit()`` of ``from accelpatch.jit import jit`` are the same
decorator. docs/jit.md is a tutorial.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from accelpatch.jit.kernel import CodeObject, Kernel, jit

__all__ = ["CodeObject", "Kernel", "jit"]


class _Decorator(ModuleType):
    def __call__(
        self, *, threads: int = 256, device: str | None = None, waits: str = "checked", without: Collection[str] = ()
    ) -> Callable[[Callable[..., Any]], Kernel]:
        return jit(threads=threads, device=device, waits=waits, without=without)


sys.modules[__name__].__class__ = _Decorator
