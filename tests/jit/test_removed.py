"""Passes of the jit that remove blocks, values, stores and code, by what a kernel is before and after each."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.jit_kernels import before_and_after, built, code, count


def test_dead_blocks() -> None:
    def body(J: Any, x: Any) -> None:
        with J.While():
            J.Break()
            J.s_sleep(3)

    before, after = before_and_after(body, "dead_blocks")
    assert (count(before, "s_sleep"), count(after, "s_sleep")) == (1, 0)


def test_common_subexpressions() -> None:
    def body(J: Any, x: Any) -> None:
        i = J.threadIdx.x
        first, second = J.gpr(i * 12 + 7), J.gpr(i * 12 + 7)
        J.global_store_dword(first, second, x)

    kernel = built(body)
    one = code(kernel.without("common_subexpressions"))
    both = code(kernel)
    assert (count(one, "v_mul_lo_u32"), count(both, "v_mul_lo_u32")) == (2, 1)
    assert any(re.fullmatch(r"global_store_dword (v\d+), \1, .*", line) for line in both)


@pytest.mark.parametrize("between", ["written", "rounding", "more lanes"])
def test_what_is_no_common_subexpression(between: str) -> None:
    """A value that was computed for other lanes, from another register, or rounded otherwise, is computed anew."""

    def body(J: Any, x: Any) -> None:
        i = J.gpr("vf32", J.threadIdx.x.to("f32"))
        some, first, second = J.gpr("vf32", 0.0), J.gpr("vf32"), J.gpr("vf32")
        with J.If(J.threadIdx.x < 7):
            some[0] = i * 5.0 if between == "more lanes" else i * 3.0
        first[0] = i * 3.0 if between == "more lanes" else i * 5.0
        if between == "written":
            i[0] = i + 1.0
        elif between == "rounding":
            J.s_setreg_imm32_b32("hwreg(HW_REG_MODE, 0, 2)", 1)
        second[0] = i * 5.0
        for at, one in enumerate((some, first, second)):
            J.global_store_dword(J.threadIdx.x * 12, one, x, mod=f"offset:{at * 4}")

    assert count(code(built(body)), "v_mul_f32") == 3


def stored_twice(J: Any, x: Any) -> None:
    offset = J.gpr(J.threadIdx.x * 4)
    J.global_store_dword(offset, J.gpr("vi32", 1), x)
    J.global_store_dword(offset, J.gpr("vi32", 2), x)


def test_dead_stores() -> None:
    before, after = before_and_after(stored_twice, "dead_stores")
    assert (count(before, "global_store_dword"), count(after, "global_store_dword")) == (2, 1)


@pytest.mark.parametrize("between", ["read", "barrier", "address", "modifier", "lanes", "atomic"])
def test_stores_that_may_be_seen_stay(between: str) -> None:
    def body(J: Any, x: Any) -> None:
        address, value = J.gpr("vu32", J.threadIdx.x * 4), J.gpr("vu32", 1)
        J.alloc_lds(512)
        J.ds_write_b32(address, value)
        if between == "read":
            J.ds_read_b32(value, J.gpr("vu32", 8))
        elif between == "barrier":
            J.s_barrier()
        elif between == "address":
            address[0] = address + 4
        elif between == "lanes":
            J.s_mov_b64("exec", 1)
        elif between == "atomic":
            J.ds_add_u32(address, value)
        J.ds_write_b32(address, value, mod="offset:0" if between == "modifier" else "")

    assert count(code(built(body)), "ds_write_b32") == 2


def test_dead_code() -> None:
    def body(J: Any, x: Any) -> None:
        kept, lost = J.gpr("vi32", 5), J.gpr("vi32", 6)
        J.global_load_dword(lost, J.threadIdx.x * 4, x)  # nothing reads it, and the jit counts the waits
        kept[0] = J.threadIdx.x * 3
        J.global_store_dword(J.threadIdx.x * 4, kept, x)

    before, after = before_and_after(body, "dead_code")
    assert (count(before, "v_mov_b32"), count(after, "v_mov_b32")) == (2, 0)
    assert (count(before, "global_load_dword"), count(after, "global_load_dword")) == (1, 0)


@pytest.mark.parametrize("name, gone", [("ds_read_b32", True), ("ds_add_rtn_u32", False), ("global_atomic_add", False)])
def test_of_what_touches_memory_only_loads_are_dead_code(name: str, gone: bool) -> None:
    def body(J: Any, x: Any) -> None:
        unread, address = J.gpr("vu32", 0), J.gpr("vu32", J.threadIdx.x * 4)
        J.alloc_lds(256)
        if name == "ds_read_b32":
            J.ds_read_b32(unread, address)
        elif name == "ds_add_rtn_u32":
            J.ds_add_rtn_u32(unread, address, address)
        else:
            J.global_atomic_add(unread, address, address, x, mod="sc0")

    assert count(code(built(body)), name) == (not gone)
    assert count(code(built(body, "checked")), name) == 1


@pytest.mark.parametrize("register", ["m0", "vcc"])
def test_a_store_is_not_dead_where_a_hidden_part_of_its_address_has_changed(register: str) -> None:
    def body(J: Any, x: Any) -> None:
        place, one, two = J.gpr(J.threadIdx.x * 4), J.gpr("vi32", 1), J.gpr("vi32", 2)
        buffer = J.buffer(x, 4096)
        for value, where in ((one, 0), (two, 256)):
            if register == "m0":
                J.s_mov_b32("m0", where)
                J.buffer_store_dword(value, place, buffer, "m0", mod="offen")
            else:
                J.s_mov_b64("vcc", where)
                J.global_store_dword(place, value, "vcc")

    before, after = before_and_after(body, "dead_stores")
    stores = "buffer_store_dword" if register == "m0" else "global_store_dword"
    assert (count(before, stores), count(after, stores)) == (2, 2)
