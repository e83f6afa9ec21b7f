"""Kernels as the user has them: the counter, parameters, arguments, what is compiled once, and errors of calls."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accelpatch
from accelpatch.errors import ArgumentError, CompileError, KernelError
from accelpatch.jit import Kernel, jit
from accelpatch.jit.emulate import EmulationError
from accelpatch.jit.signature import packed

ROOT = Path(__file__).parent.parent.parent
COUNTER = """
@accelpatch.jit()
def kernel(J, N, s_pout:"int*"):
    s_i = J.gpr('si32')
    s_cnt = J.gpr('si32')
    s_i[0] = 0
    s_cnt[0] = 0
    with J.While(s_i[0] < N) as loop:
        with J.If((s_i[0] & 1)==0):
            s_cnt[0] = s_cnt + s_i
        s_i[0] = s_i[0] + 1

    J.s_store_dword(s_cnt, s_pout, 0, mod="glc")
    J.s_waitcnt(mod=f"lgkmcnt({0})")

OUT = torch.arange(0,32, dtype=torch.int)
kernel([1],[64], 32, OUT.data_ptr())
assert OUT[0] == sum([i if (i & 1) == 0 else 0 for i in range(32)]), f"{OUT=}"
"""


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_the_counter(arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it stands in its page, by the emulator."""
    call = Kernel.__call__

    def emulated(self: Kernel, *arguments: Any) -> None:
        call(self, *arguments, device="emulate", arch=arch)

    monkeypatch.setattr(Kernel, "__call__", emulated)
    file = tmp_path / "counter.py"
    file.write_text(COUNTER)
    exec(compile(COUNTER, str(file), "exec"), {"accelpatch": accelpatch, "torch": torch})


def test_importing_the_jit_loads_no_torch() -> None:
    code = "import sys, accelpatch; accelpatch.jit(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert accelpatch.jit.jit is jit


@jit()
def scaled(J, factor, x: "float*", n: "int", by: "float", out: "float*", start: "int64_t" = 0):
    offset = J.gpr(J.threadIdx.x * 4)
    with J.If(J.threadIdx.x < n):
        value = J.gpr("vf32")
        J.global_load_dword(value, offset, x)
        J.s_waitcnt(mod="vmcnt(0)")
        value[0] = value * by * factor + start.to("i32").to("f32")
        J.global_store_dword(offset, value, out)


def call(**changed: Any) -> torch.Tensor:
    given = {"factor": 2.0, "x": torch.arange(64.0), "n": 10, "by": 0.5, "out": torch.zeros(64), "start": 3} | changed
    scaled([1], [64], *given.values(), device="emulate")
    return given["out"]


def test_compile_time_and_run_time_arguments_in_one_order() -> None:
    assert torch.equal(call()[:10], torch.arange(10.0) + 3)
    assert not call()[10:].any()
    out, ones = torch.zeros(64), torch.ones(64)
    scaled([1], [64], 4.0, ones.data_ptr(), 2, 1, out, device="emulate")
    assert out[:3].tolist() == [4, 4, 0]


@pytest.mark.parametrize("changed, message", [
    ({"x": torch.arange(64)}, r"x is float\*: pass a tensor of float32, not of int64"),
    ({"x": 1.5}, r"x is float\*: pass a tensor or its data_ptr\(\), not float"),
    ({"n": 1.0}, "n is int: pass a number of that type, not 1.0"),
    ({"n": True}, "n is int: pass a number of that type, not True"),
    ({"n": 1 << 31}, "n is int, which 2147483648 does not fit into"),
    ({"by": "1"}, "by is float: pass a number of that type"),
    ({"start": torch.zeros(1)}, "start is int64_t: pass a number of that type"),
], ids=lambda one: next(iter(one)) if isinstance(one, dict) else "")  # fmt: skip
def test_an_argument_of_the_wrong_type(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changed)


@pytest.mark.parametrize("run, message", [
    (lambda: scaled([1], [64], 2.0), r"takes \(factor, x, n, by, out, start\): x, n, by, out is missing"),
    (lambda: scaled([1], [64], *range(9)), r"takes \(factor, x, n, by, out, start\), not 9"),
    (lambda: scaled.source("gfx942"), r"takes \(factor\): factor is missing"),
    (lambda: scaled.source("gfx942", 1.0, factor=2.0), "factor is none of them or given twice"),
    (lambda: scaled([0], [64], 2.0, 0, 0, 0.0, 0), "grid is a list of one to three sizes above zero"),
    (lambda: scaled(1, [64], 2.0, 0, 0, 0.0, 0), "grid is a list of one to three sizes above zero"),
    (lambda: scaled([1], [512], 2.0, 0, 0, 0.0, 0), r"at most 256 threads, not \[512\]: say jit\(threads=512\)"),
    (lambda: jit(threads=2048), "a workgroup has 1 to 1024 threads"),
    (lambda: accelpatch.jit(threads=scaled), "write @jit()"),
])  # fmt: skip
def test_calls_that_do_not_fit(run: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run()


@pytest.mark.skipif(torch.version.hip is not None, reason="there may be an AMD GPU")
def test_without_a_gpu_the_emulator_is_named() -> None:
    with pytest.raises(KernelError, match="torch has no AMD GPU here: pass device='emulate'"):
        scaled([1], [64], 2.0, torch.zeros(64), 1, 1.0, torch.zeros(64))
    with pytest.raises(KernelError, match="device is 'emulate', or None"):
        scaled([1], [64], 2.0, torch.zeros(64), 1, 1.0, torch.zeros(64), device="cuda")


def y(J):
    pass


def strange(J, x: "image2d"):
    pass


@pytest.mark.parametrize("function, message", [
    pytest.param(strange, 'x has the type "image2d": a kernel takes pointers, int, float', id="type"),
    pytest.param(lambda: None, "takes no J", id="no J"),
    pytest.param(y, "y cannot name a kernel", id="name"),
    pytest.param(lambda J, *x: None, r"\*x is no parameter that a kernel can have", id="starred"),
])  # fmt: skip
def test_parameters_that_a_kernel_cannot_have(function: Any, message: str) -> None:
    with pytest.raises(CompileError, match=rf"test_kernel\.py:\d+: .*{message}"):
        jit()(function)


def test_annotations_that_are_no_strings_are_compile_time() -> None:
    """This file's are all strings (`from __future__ import annotations`), those of HIP types twice."""

    def kernel(J: Any, n: int, out: "int*") -> None:
        J.s_store_dword(J.gpr("si32", n), out, 0)

    made = jit()(kernel)
    assert made.signature.constants == ("n",)
    assert [one.hip for one in made.signature.arguments] == ["int*"]


def test_the_segment_of_arguments() -> None:
    """Each at a multiple of its size, as HIP lays them out."""
    arguments = scaled.signature.arguments
    values = {"x": 0x1122, "n": -2, "by": 1.0, "out": 0x3344, "start": 1}
    held = packed(arguments, values)
    assert held == bytes.fromhex("2211000000000000feffffff0000803f44330000000000000100000000000000")


def test_a_loop_that_never_ends_is_stopped() -> None:
    @jit(device="emulate")
    def endless(J, out: "int*"):
        with J.While():
            J.s_nop(0)

    with pytest.raises(EmulationError, match=r"test_kernel\.py"):
        endless([1], [64], torch.zeros(1, dtype=torch.int32), steps=1000)


def test_an_access_out_of_bounds_names_lane_and_line() -> None:
    with pytest.raises(EmulationError, match=r"(?s)test_kernel\.py:\d+.*lane 32|lane 32.*test_kernel\.py:\d+"):
        call(x=torch.arange(32.0), n=64)


def test_ir_shows_blocks_and_lines() -> None:
    shown = str(scaled.ir("gfx942", 2.0))
    assert "entry:  ; then" in shown
    assert "global_load_dword %v.value." in shown
    assert "// test_kernel.py:" in shown


def test_a_kernel_is_traced_once_for_its_values() -> None:
    count = []

    def kernel(J, n, out: "int*"):
        count.append(n)
        J.s_store_dword(J.gpr("si32", n), out, 0)

    made, out = jit(device="emulate")(kernel), np.zeros(1, np.int32)
    for n in (1, 1, 2):
        made([1], [64], n, out)
    assert count == [1, 2]
    assert out[0] == 2


@pytest.mark.parametrize("values", [
    pytest.param((1, 1.0), id="equal, and not the same"), pytest.param(([1], [2]), id="lists"),
    pytest.param((lambda: 1, lambda: 2), id="functions"),
])  # fmt: skip
def test_values_of_their_own_have_kernels_of_their_own(values: tuple[Any, Any]) -> None:
    seen = []

    def kernel(J, value, out: "int*"):
        seen.append(value)
        J.s_nop(0)

    made = jit()(kernel)
    for value in values:
        made.source("gfx942", value)
    assert [one is other for one, other in zip(seen, values, strict=True)] == [True, True]


def test_two_hundred_instructions_compile_in_three_tenths_of_a_second() -> None:
    def kernel(J, x: "float*"):
        rows = [J.gpr(4, "vf32", 0.0) for _ in range(8)]
        with J.For(0, 10):
            for row in rows:
                J.global_load_dwordx4(row, J.threadIdx.x, x)
            J.s_waitcnt(mod="vmcnt(0)")
            for at in range(192):
                rows[at % 8][at % 4] = rows[at % 8][at % 4] * rows[(at + 1) % 8][at % 3] + 1.0
        with J.If(J.threadIdx.x < 7):
            for row in rows:
                J.global_store_dwordx4(J.threadIdx.x, row, x)

    jit()(kernel).ir("gfx90a")  # what is read once in a process
    times = []
    for _ in range(3):
        start = time.perf_counter()
        program = jit()(kernel).ir("gfx942")
        times.append(time.perf_counter() - start)
    assert len(list(program.instructions())) >= 200
    assert min(times) < 0.3
