"""A kernel as the gate of Triton's kernels compiles it, and what must hold of its code on Hopper.

Compilers run in child processes, one for each thread: one that aborts is a fault of its kernel and does not end the
gate.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from accelpatch.errors import CompileError
from accelpatch.kernels.triton.compile_guard import Compiler, Form, reason_of

ARCHS = ("gfx90a", "gfx942", "gfx950")
HOPPER = GPUTarget("cuda", 90, 32)
ALIGNED = re.compile(r"capacity|heads|k|inner|width|(q|k|v|bias)_[bhmn]")
GLOBAL = re.compile(r"\b(?:ld|st|atom|red)\.(?:[a-z0-9_]+\.)*global|\bcp\.async|\bprefetch")
SPILLED = 192  # bytes a thread that attention may spill on Hopper
BEHIND = 288  # bytes that products of codes may spill, which they do behind their loop


@dataclass(frozen=True)
class Build:
    """A kernel with the types of its arguments, in order, and its compile-time values, as a 7B model launches it."""

    kernel: Any
    types: tuple[str, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    scalars: int = 0  # scalar registers that may be kept in lanes of a vector register: no memory is touched for them
    archs: tuple[str, ...] = ARCHS
    options: Mapping[str, int] = field(default_factory=dict)  # of the launch, besides warps
    vectors: int = 0  # vector registers that may be kept in accumulation registers, likewise
    amd_alone: bool = False  # another tile of a kernel whose order of waiting another build shows


class _Thread(threading.local):
    def __init__(self) -> None:
        self.compiler = Compiler()


_thread = _Thread()


def compiled(build: Build, target: GPUTarget, **changed: Any) -> Any:
    """A kernel for a GPU, some of its compile-time values others. Raises CompileError where it cannot be compiled."""
    kernel, names = build.kernel, build.kernel.arg_names
    types = [*build.types, *("constexpr" for _ in build.constants)]
    # as at a launch: tensors, strides and the sizes of caches are multiples of 16; AMD reads tensors of less than 2 GiB
    # through buffers
    tensor = [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if target.backend == "hip" else ())]
    attrs = {
        (place,): tensor if types[place][0] == "*" else tensor[:1]
        for place, name in enumerate(names)
        if types[place][0] == "*" or (types[place] == "i32" and ALIGNED.fullmatch(name))
    }
    source = ASTSource(kernel, dict(zip(names, types, strict=True)), dict(build.constants) | changed, attrs)
    options = {"num_warps": build.warps, **build.options}
    name = kernel.fn.__module__, kernel.fn.__name__, ""
    form = Form(*name, source.signature, source.constants, attrs, target, options)
    answer = _thread.compiler.compile(form)
    if answer is None:
        raise CompileError("no child process can be started")
    if reason := reason_of(form, *answer):
        raise CompileError(reason)
    return triton.compile(source, target=target, options=options)  # from Triton's cache


def impatient(build: Build) -> list[str]:
    """What is wrong with the order of a kernel that begins early."""
    code = compiled(build, HOPPER, DEPENDENT=True).asm["ptx"]
    wait, touch = code.find("griddepcontrol.wait"), GLOBAL.search(code)
    if wait < 0 or touch is None:
        return ["it does not wait" if wait < 0 else "it touches no memory"]
    return ["it touches memory before it waits"] if touch.start() < wait else []


def no_matrix_unit(build: Build) -> list[str]:
    """What is wrong with products of 8-bit floats on Hopper, whose unit's sums go into float32 ones."""
    code = compiled(build, HOPPER, FLOAT=64).asm["ptx"]
    return [] if re.search(r"wgmma\S+\.f32\.e4m3\.e4m3", code) else ["no product of 8-bit floats"]


def slow_on_hopper(build: Build, most: int = SPILLED) -> list[str]:
    """What is wrong with attention, or products of codes, on Hopper: more than `most` bytes of registers in memory, or
    products that wait for each other."""
    code = compiled(build, HOPPER).asm["ptx"]
    found = [] if "wgmma.mma_async" in code else ["no product of its matrix unit"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(code)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = max(int(one) for one in re.findall(r"(\d+) bytes spill stores", log))
    found += [f"{spilled} bytes spilled"] if spilled > most else []
    return found + (["its products are serialised"] if "serialized" in log else [])
