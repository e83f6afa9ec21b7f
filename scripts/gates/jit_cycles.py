"""What the jit makes of the GEMV and of the MFMA tile, beside what clang's HIP compiler makes of the same loops.

Cycles are llvm-mca's, of the loop that does the work. Of the HIP loop the fastest of several ways to unroll it counts.
"""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from accelpatch.jit.cycles import bytes_loaded, code, cycles, instructions, loops

ROOT = Path(__file__).parent.parent.parent
SOURCES = Path(__file__).parent / "jit"
ARCH = "gfx942"
ROUNDS = 50
#: kernel -> the most cycles that the jit's may take, as a multiple of the HIP compiler's
BOUNDS = {"gemv": 1.1, "gemm": 1.2}
DEPTHS = (4096, 11008)
Count = Callable[[Sequence[str]], int]


def by_hip(name: str, **defines: int) -> list[str]:
    """The code of a HIP kernel for ARCH."""
    command = ["clang++-19", "-x", "hip", "--rocm-path=/usr", "-nogpulib", "-O3", "-std=c++17", "--cuda-device-only",
               "-S", f"--offload-arch={ARCH}", *(f"-D{key}={value}" for key, value in defines.items()),
               str(SOURCES / f"{name}.hip"), "-o", "-"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return code(done.stdout, name)


def per_unit(lines: Sequence[str], count: Count) -> float:
    """Cycles for one of what ``count`` counts: of the loop with most of it, of all where there is no such loop."""
    found = [loop for loop in loops(lines) if count(loop)]
    most = max(map(count, found), default=0)
    loop = next((one for one in found if count(one) == most), None)
    if loop is None:
        loop = instructions(lines)
    return cycles(loop, ARCH, ROUNDS) / count(loop)


def products(lines: Sequence[str]) -> int:
    return sum(line.startswith("v_mfma") for line in lines)


def figures() -> Iterator[tuple[str, str, float, float]]:
    """Kernel, of what, cycles by the jit and by HIP's compiler: for a byte that a lane loads, a product of 32 x 32."""
    gemv, gemm = (runpy.run_path(str(ROOT / f"examples/jit/{name}.py"))[name] for name in BOUNDS)
    for depth in DEPTHS:
        ours = per_unit(code(gemv.source(ARCH, depth), "gemv"), bytes_loaded)
        theirs = min(per_unit(by_hip("gemv", K=depth, UNROLL=unroll), bytes_loaded) for unroll in (1, 2, 4, 8))
        yield "gemv", f"K {depth}, a byte", ours, theirs
    for kind in ("bf16", "i8"):
        ours = per_unit(code(gemm.source(ARCH, kind, 4096, 4096), "gemm"), products)
        theirs = per_unit(by_hip("gemm", K=4096, N=4096, INT8=int(kind == "i8")), products)
        yield "gemm", f"{kind}, an MFMA", ours, theirs


def faults() -> Iterator[str]:
    """What is slower than its bound, or loads less than it could; prints the figures."""
    for name, what, ours, theirs in figures():
        print(f"{name} {what}: {ours:.3f} cycles by the jit, {theirs:.3f} by HIP's compiler, {ours / theirs:.2f} of it")
        if ours > BOUNDS[name] * theirs:
            yield f"{name} {what}: {ours:.3f} cycles, over {BOUNDS[name]} times {theirs:.3f}"
    gemv = runpy.run_path(str(ROOT / "examples/jit/gemv.py"))["gemv"]
    for depth in DEPTHS:
        text = gemv.source(ARCH, depth)
        narrow = re.findall(r"\t(global_load_(?!dwordx4)\w+)", text)
        if narrow or "scratch_" in text or ".vgpr_spill_count: 0" not in text:
            yield f"gemv K {depth}: loads {narrow or 'scratch memory'}, not dwordx4 alone"
