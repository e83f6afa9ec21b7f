"""Places for registers: what shares one, what must not, alignment, the budget of a workgroup, and running out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import jit
from accelpatch.jit.compiling import Compiled, compiled
from accelpatch.jit.kernel import Kernel
from accelpatch.jit.passes.allocation import live_ranges, vector_budget
from accelpatch.jit.passes.liveness import dataflow
from accelpatch.jit.passes.waits import check_waits

HERE = Path(__file__)


def built(kernel: Kernel, arch: str = "gfx942") -> Compiled:
    return compiled(kernel.function, arch, kernel.threads, kernel.signature.arguments, {})


@jit()
def many(J, x: "int*", out: "int*"):
    """Values that come and go, arrays among them, across a loop with lanes that leave it early."""
    offset = J.gpr(J.threadIdx.x * 4)
    rows = [J.gpr(size, "vi32", at) for at, size in enumerate((1, 4, 2, 3, 8, 1))]
    total = J.gpr("vi32", 0)
    with J.For(0, 4) as i:
        short = J.gpr(2, "vi32", i)
        with J.If(J.threadIdx.x < 20):
            rows[1][2] = rows[1][2] + short[0] + rows[4][7]
            J.Continue()
        for row in rows:
            total[0] = total + row[0]
    for row in rows:
        total[0] = total + row[row.count - 1]
    J.global_store_dword(offset, total, out)


def test_what_lives_at_one_time_has_places_of_its_own() -> None:
    made = built(many)
    program, allocation = made.program, made.allocation
    ranges = live_ranges(program, dataflow(program), check_waits(program))
    taken: dict[tuple[str, int], int] = {}
    for register, first in allocation.first.items():
        for at in range(register.dwords):
            life = ranges.get(register.first_regunit + at, 0)
            assert not taken.get((register.file, first + at), 0) & life
            taken[register.file, first + at] = taken.get((register.file, first + at), 0) | life
    vectors = sum(one.dwords for one in program.registers if one.file == "v")
    assert allocation.used["v"] < vectors


def test_alignment() -> None:
    made = built(many)
    for register, first in made.allocation.first.items():
        assert first % register.alignment[0] == 0
        if register.file == "v" and register.dwords > 1:
            assert first % 2 == 0


def test_what_the_hardware_fills_stays_where_it_is() -> None:
    made = built(many)
    fixed = {one: one.fixed for one in made.program.registers if one.fixed is not None and one in made.allocation.first}
    assert {one: made.allocation.first[one] for one in fixed} == fixed


def test_the_target_of_a_load_is_free_again_after_its_wait_alone() -> None:
    """Nothing reads what is loaded, and still no other value may lie there before it has come."""

    def kernel(J, x: "int*", out: "int*"):
        unused = J.gpr("vi32")
        offset = J.gpr(J.threadIdx.x * 4)
        J.global_load_dword(unused, offset, x)
        value = J.gpr("vi32", 5)
        J.global_store_dword(offset, value, out)
        J.s_waitcnt(mod="vmcnt(0)")
        later = J.gpr("vi32", 6)
        J.global_store_dword(offset, later, out)

    made = built(jit()(kernel))
    at = {register.name: first for register, first in made.allocation.first.items() if register.file == "v"}
    assert at["unused"] != at["value"]
    assert at["unused"] != at["offset"]


@pytest.mark.parametrize("threads, registers", [(64, 512), (256, 512), (512, 256), (1024, 128)])
def test_the_budget(threads: int, registers: int) -> None:
    assert vector_budget(threads) == registers


def vectors(J: Any, x: Any) -> None:
    held = J.gpr(200, "vf32", 0.0)  # held
    more = J.gpr(64, "vf32", 1.0)  # more
    for at in range(64):
        held[at] = held[at] + more[at]  # the sum
    for at in range(200):
        J.global_store_dword(J.threadIdx.x, held[at], x)


def scalars(J: Any, x: Any) -> None:
    rows = [J.gpr("si32", at) for at in range(120)]
    for one in rows:
        J.s_store_dword(one, x, 0)


def line(text: str) -> int:
    return next(at for at, one in enumerate(HERE.read_text().splitlines(), 1) if one.endswith(f"# {text}"))


def test_running_out_of_vector_registers_says_who_holds_them_and_where() -> None:
    def kernel(J, x: "float*"):
        vectors(J, x)

    with pytest.raises(CompileError) as raised:
        jit()(kernel).ir()
    message = str(raised.value)
    assert message.startswith(f"test_allocation.py:{line('more')}: vector registers run out: ")
    assert "256 are available" in message
    assert f"held of test_allocation.py:{line('held')} (200)" in message
    assert f"more of test_allocation.py:{line('more')} (64)" in message


def test_running_out_of_scalar_registers() -> None:
    def kernel(J, x: "int*"):
        scalars(J, x)

    with pytest.raises(CompileError, match=r"scalar registers run out: 1\d\d are live here and 102 are available"):
        jit()(kernel).ir()


def test_a_larger_workgroup_has_fewer() -> None:
    def kernel(J, x: "float*"):
        held = J.gpr(130, "vf32", 0.0)
        for at in range(130):
            J.global_store_dword(J.threadIdx.x, held[at], x)

    assert jit()(kernel).compile("gfx942").vgprs > 130
    with pytest.raises(CompileError, match="128 are available"):
        jit(threads=1024)(kernel).ir()


def test_accumulators_share_the_file_with_vectors() -> None:
    def kernel(J, x: "float*"):
        held = J.gpr(100, "vf32", 0.0)
        more = J.gpr(128, "af32", 0.0)
        for at in range(100):
            J.global_store_dword(J.threadIdx.x, held[at], x)
        for at in range(128):
            J.global_store_dword(J.threadIdx.x, more[at], x)

    made = jit()(kernel).compile("gfx942")
    assert made.agprs == 128
    assert ".amdhsa_accum_offset 10" in made.assembly
    with pytest.raises(CompileError, match="accumulator registers run out"):
        jit(threads=1024)(kernel).compile("gfx942")


def test_lds_has_an_end() -> None:
    def kernel(J):
        assert J.alloc_lds(10) == 0
        assert J.alloc_lds(40 << 10, align=64) == 64
        J.alloc_lds(40 << 10)

    assert jit()(kernel).compile("gfx950").lds == 64 + (80 << 10)
    with pytest.raises(CompileError, match="81984 bytes of LDS, where gfx942 has 65536 for a workgroup"):
        jit()(kernel).ir("gfx942")
