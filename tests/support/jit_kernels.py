"""Kernels of a few lines for tests of the jit: each work item loads an element, computes, and stores."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accelpatch.jit import jit
from accelpatch.jit.kernel import OPTIONAL, Kernel

ARCHS = ("gfx90a", "gfx942", "gfx950")
LANES = 64
Compute = Callable[..., Any]


@jit()
def _elements(J, compute, kinds, result, x: "void*", y: "void*", out: "void*"):
    """out[i][lane] = the i-th expression that compute(J, a, b) lists."""
    item = J.threadIdx.x
    values = []
    for kind, source in zip(kinds, (x, y), strict=True):
        value = J.gpr(kind)
        wide = value.dwords == 2
        load = J.global_load_dwordx2 if wide else J.global_load_dword
        load(value, J.gpr(item * (8 if wide else 4)), source)
        values.append(value)
    J.s_waitcnt(mod="vmcnt(0)")
    for at, one in enumerate(compute(J, *values)):
        held = J.gpr(result, one)
        wide = held.dwords == 2
        store = J.global_store_dwordx2 if wide else J.global_store_dword
        size = 8 if wide else 4
        store(J.gpr(item * size + at * size * LANES), held, out)


def elements(
    compute: Compute, x: np.ndarray, y: np.ndarray, count: int, result: str, kinds: Sequence[str], arch: str
) -> np.ndarray:
    """What expressions of two vectors are, one row each, as the type ``result``, such as "vi32"."""
    bits = "64" if "64" in result else "32"
    out = np.zeros((count, LANES), f"{ {'i': 'int', 'u': 'uint', 'f': 'float'}[result[1]] }{bits}")
    _elements([1], [LANES], compute, tuple(kinds), result, x, y, out, device="emulate", arch=arch)
    return out


def lane_kernel(body: Compute) -> Kernel:
    """A kernel of x: "int*" and out: "int*": ``body(J, a)`` gives the register to store."""

    def kernel(J: Any, x: "int*", out: "int*") -> None:
        offset, value = J.gpr(J.threadIdx.x * 4), J.gpr("vi32")
        J.global_load_dword(value, offset, x)
        J.s_waitcnt(mod="vmcnt(0)")
        J.global_store_dword(offset, body(J, value), out)

    return jit()(kernel)


def lanes(body: Compute, x: np.ndarray, arch: str = "gfx942") -> list[int]:
    """What a kernel of lane_kernel stores."""
    out = np.full(LANES, -77, np.int32)
    lane_kernel(body)([1], [LANES], x, out, device="emulate", arch=arch)
    return list(map(int, out))


def names(function: Compute, arch: str = "gfx942") -> list[str]:
    """The instructions that ``function(J, ...)`` becomes, without those of its prologue, of memory and control."""
    units = ("control", "smem", "global", "buffer", "flat", "ds")
    program = jit(without=["common_subexpressions", "hide_stalls"])(function).ir(arch)
    return [one.name for one in program.instructions() if one.form.unit not in units and not one.in_prologue]


def line_of(text: str) -> int:
    """The number of the line of the calling file that holds a text as a comment."""
    source = inspect.getsource(sys.modules[sys._getframe(1).f_globals["__name__"]])
    return next(number for number, line in enumerate(source.splitlines(), 1) if line.endswith(f"# {text}"))


def built(body: Callable[..., None], waits: str = "auto", **given: Any) -> Kernel:
    """A kernel of ``body(J, x)``, x: "int*"."""

    def kernel(J: Any, x: "int*") -> None:
        body(J, x)

    return jit(waits=waits, **given)(kernel)


def code(kernel: Kernel, arch: str = "gfx942") -> list[str]:
    """The instructions between the loads of arguments and the end."""
    text = re.findall(r"^\t([a-z]\w*[^/\n]*?)\s*//", kernel.source(arch), re.MULTILINE)
    return [line for line in text if not line.startswith(("s_load_dword", "s_endpgm"))]


def before_and_after(body: Callable[..., None], name: str, waits: str = "auto") -> tuple[list[str], list[str]]:
    """The instructions with no pass that only improves, and with this one."""
    kernel = built(body, waits)
    return code(kernel.without(*OPTIONAL)), code(kernel.without(*(one for one in OPTIONAL if one != name)))


def count(lines: list[str], name: str) -> int:
    """How many of the lines have an instruction."""
    return sum(line.split()[0] == name for line in lines)
