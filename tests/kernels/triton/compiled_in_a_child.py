"""A program for a gfx942 that is not there: kernels are compiled and not launched, and some compilers end.

    python -m tests.kernels.triton.compiled_in_a_child

test_compile_guard.py runs it, and reads what it prints: what each launch said, of which forms the child was asked, and
which of the compiles in this process only read Triton's cache. ending_child.py is its child.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from accelpatch.errors import CompileError
from accelpatch.kernels.triton import compile_child, compile_guard, flash_attention
from accelpatch.kernels.triton.flash_tiles import Tile

WAYS = ("runs", "aborts", "crashes", "is killed", "raises")
SIGNALS = {"aborts": signal.SIGABRT, "crashes": signal.SIGSEGV, "is killed": signal.SIGKILL}


@triton.jit
def kernel(x, WAY: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x, 1)


def child() -> None:
    """The child process, with a compiler that ends as its kernel says."""
    whole = triton.compile

    def compile(source: Any, **given: Any) -> Any:
        way = source.constants.get((1,), "runs")  # attention has none, and ends as it will
        if way != "runs":
            print("its first line\nAssertion `it holds' failed.\nits last line", file=sys.stderr, flush=True)
        if way in SIGNALS:
            os.kill(os.getpid(), SIGNALS[way])
        if way == "raises":
            raise ValueError("no such instruction")
        return whole(source, **given)

    triton.compile = compile
    compile_child.main()


class Driver:
    """Of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)


def compiled(kernel: Any, *args: Any, **options: Any) -> str:
    """What a launch says that only compiles."""
    try:
        with compile_guard.guarded(nullcontext()):
            kernel.warmup(*args, grid=(1,), **options)
    except CompileError as error:
        return str(error)
    return ""


def attention(tile: Tile) -> str:
    """What flash_attention's kernel with a softcap says, for heads of 64."""
    tensor, strides = torch.bfloat16, (1 << 20, 4096, 64)
    return compiled(
        flash_attention.attend, *(tensor,) * 3, torch.int32, *(tensor,) * 3, *(64,) * 7, 1.0, 1.0, *strides * 3,
        *(0,) * 4, False, True, False, flash_attention.NO_BIAS, False, True, False, 64, 64, tile.m, tile.n,
        **tile.options(),
    )  # fmt: skip


def main(kernel: Any) -> None:
    """Compile, and print what there is to say of it."""
    asked: list[str] = []
    hits: list[bool] = []
    ask = compile_guard.Compiler.compile

    def counted(self: compile_guard.Compiler, form: compile_guard.Form) -> Any:
        asked.append(str(form.constants.get((1,), form.name)))
        return ask(self, form)

    compile_guard.Compiler.compile = counted  # type: ignore[method-assign]
    driver.set_active(Driver())
    triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    before = triton.knobs.runtime.jit_cache_hook
    compile_guard.CHILD = "tests.kernels.triton.ending_child"
    said = {f"attention, stages: {tile.stages}": attention(tile) for tile in (Tile(64, 64, 4, 1), Tile(64, 64, 4, 2))}
    compile_guard.OURS = "tests"
    said |= {way: compiled(kernel, torch.float32, way) for way in WAYS for _ in range(2)}
    assert triton.knobs.runtime.jit_cache_hook is before
    print(json.dumps({"said": said, "asked": asked, "hits": hits}))


if __name__ == "__main__":
    from tests.kernels.triton import compiled_in_a_child as ours  # under the name by which the child imports its kernel

    ours.main(ours.kernel)
