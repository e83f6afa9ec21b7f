"""Waits that the jit puts in: where, for how many, and what it says of those that a kernel has beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import jit
from tests.jit import test_waits
from tests.support.jit_kernels import line_of

Body = Callable[..., None]
#: instructions stay in their order, and all of them
AS_WRITTEN = ("dead_code", "dead_stores", "hide_stalls", "hide_argument_loads", "common_subexpressions")


def shown(body: Body, *without: str, arch: str = "gfx942") -> list[str]:
    """Waits with their counts, and the names of memory instructions, barriers and additions."""

    def kernel(J: Any, x: "int*") -> None:
        a, b, s = J.gpr("vi32", name="a"), J.gpr("vi32", name="b"), J.gpr("si32", name="s")
        body(J, x, a, b, s)

    made = jit(waits="auto", without=(*AS_WRITTEN, *without))(kernel).ir(arch).instructions()
    listed = ("s_waitcnt", "s_barrier", "ds_", "global_", "buffer_", "v_add", "s_add", "s_load", "s_store", "s_dcache")
    return [" ".join(one.text.split()[: 2 if one.name == "s_waitcnt" else 1]) for one in made
            if one.name.startswith(listed) and not one.in_prologue]  # fmt: skip


def loads(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
    J.global_load_dword(a, J.threadIdx.x, x)
    J.global_load_dword(b, J.threadIdx.x, x)
    a[0] = a + 1
    b[0] = b + 1


def test_it_waits_for_as_few_as_a_use_needs() -> None:
    two = ["global_load_dword", "global_load_dword"]
    assert shown(loads) == [*two, "s_waitcnt vmcnt(1)", "v_add_u32", "s_waitcnt vmcnt(0)", "v_add_u32"]
    assert shown(loads, "auto_waits") == [*two, *2 * ["s_waitcnt vmcnt(0)", "v_add_u32"]]


def test_scalar_memory_comes_in_no_order() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        more = J.gpr("si32")
        J.s_load_dword(s, x, 0)
        J.s_load_dword(more, x, 4)
        s[0] = s + 1
        more[0] = more + 1

    assert shown(body) == ["s_load_dword", "s_load_dword", "s_waitcnt lgkmcnt(0)", "s_add_u32", "s_add_u32"]


def test_one_way_is_enough_to_wait() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        a[0] = 1
        with J.If(J.blockIdx.x == 0):
            J.global_load_dword(a, J.threadIdx.x, x)
        a[0] = a + 1

    assert shown(body) == ["global_load_dword", "s_waitcnt vmcnt(0)", "v_add_u32"]


def test_a_loop_waits_for_what_its_last_round_began() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        a[0] = 0
        with J.For(0, 4):
            a[0] = a + 1
            J.global_load_dword(a, J.threadIdx.x, x)
            J.global_load_dword(b, J.threadIdx.x, x)

    assert shown(body)[:5] == ["s_waitcnt vmcnt(1)", "v_add_u32", "global_load_dword", "s_waitcnt vmcnt(1)",
                               "global_load_dword"]  # fmt: skip


def test_a_barrier_comes_after_accesses_of_lds_alone() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        J.alloc_lds(256)
        J.global_load_dword(a, J.threadIdx.x, x)
        J.ds_write_b32(J.threadIdx.x * 4, J.gpr("vi32", 1))
        J.s_barrier()
        J.s_barrier()

    assert shown(body) == ["global_load_dword", "ds_write_b32", "s_waitcnt lgkmcnt(0)", "s_barrier", "s_barrier"]


def test_a_load_into_lds_is_over_before_a_barrier() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        J.alloc_lds(256)
        J.s_mov_b32("m0", 0)
        J.global_load_lds_dword(J.threadIdx.x * 4, x)
        J.s_barrier()

    assert shown(body) == ["global_load_lds_dword", "s_waitcnt vmcnt(0)", "s_barrier"]


def test_the_scalar_cache_is_written_back_after_the_stores() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        s[0] = 1
        J.s_store_dword(s, x, 0)

    assert shown(body) == ["s_store_dword", "s_waitcnt lgkmcnt(0)", "s_dcache_wb"]


def test_a_wait_of_the_kernel_s_own_is_enough() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        J.global_load_dword(a, J.threadIdx.x, x)
        J.s_waitcnt(mod="vmcnt(0)")
        a[0] = a + 1

    assert shown(body) == ["global_load_dword", "s_waitcnt vmcnt(0)", "v_add_u32"]


def test_a_wait_that_contradicts_is_an_error_with_both_lines() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        J.global_load_dword(a, J.threadIdx.x, x)  # the load
        J.s_waitcnt(mod="vmcnt(1)")  # the wait
        a[0] = a + 1  # the use

    load, wait, use = (f"test_auto_waits.py:{line_of(text)}" for text in ("the load", "the wait", "the use"))
    with pytest.raises(CompileError) as raised:
        shown(body)
    first = f"{use}: v_add_u32 reads a, which global_load_dword of {load} may not have filled"
    assert str(raised.value).startswith(first)
    assert f"the wait of {wait}, vmcnt(1), leaves that under way, where vmcnt(0) is needed" in str(raised.value)


@pytest.mark.parametrize("body", [test_waits.read, test_waits.written, test_waits.next_round, test_waits.stored])
def test_kernels_that_wait_too_little_by_themselves(body: Body) -> None:
    def kernel(J: Any, x: "int*") -> None:
        registers = zip("abst", ("vi32", "vi32", "si32", "si32"), strict=True)
        body(J, x, *(J.gpr(kind, name=name) for name, kind in registers))

    with pytest.raises(CompileError, match="may not have filled yet"):
        jit()(kernel).ir()
    jit(waits="auto")(kernel).ir()


def test_a_wait_of_its_own_for_one_load_leaves_the_other_to_the_pass() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        J.global_load_dword(a, J.threadIdx.x, x)
        J.global_load_dword(b, J.threadIdx.x, x)
        J.s_waitcnt(mod="vmcnt(1)")
        a[0] = a + 1
        b[0] = b + 1

    found = [line for line in shown(body) if not line.startswith("global")]
    assert found == ["s_waitcnt vmcnt(1)", "v_add_u32", "s_waitcnt vmcnt(0)", "v_add_u32"]


def test_lds_is_read_behind_what_memory_loads_into_it() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        place = J.alloc_lds(256)
        buffer = J.buffer(x, 256)
        J.s_mov_b32("m0", place)
        a[0] = J.lane_id * 4
        J.buffer_load_dword(a, buffer, 0, mod="offen lds")
        J.ds_read_b32(b, J.lane_id * 4)

    found = shown(body)
    assert found[found.index("buffer_load_dword") + 1 :] == ["s_waitcnt vmcnt(0)", "ds_read_b32"]


def test_a_wait_of_its_own_that_is_too_little_for_a_barrier_is_an_error() -> None:
    def body(J: Any, x: Any, a: Any, b: Any, s: Any) -> None:
        a[0] = 1
        J.ds_write_b32(J.lane_id * 4, a)
        J.ds_write_b32(J.lane_id * 4, a, mod="offset:256")
        J.s_waitcnt(mod="lgkmcnt(1)")
        J.s_barrier()

    with pytest.raises(CompileError, match=r"s_barrier comes before ds_write_b32 .* lgkmcnt\(0\) is needed"):
        shown(body)
