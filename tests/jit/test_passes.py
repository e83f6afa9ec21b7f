"""Passes of the jit that move instructions and place registers, before and after; and what passes leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accelpatch.errors import ArgumentError, CompileError, KernelError
from accelpatch.jit import jit
from accelpatch.jit.kernel import PASSES
from accelpatch.jit.passes import pipeline
from tests.support.jit_kernels import before_and_after, built, code, count, line_of


def stored_twice(J: Any, x: Any) -> None:
    offset = J.gpr(J.threadIdx.x * 4)
    J.global_store_dword(offset, J.gpr("vi32", 1), x)  # the first
    J.global_store_dword(offset, J.gpr("vi32", 2), x)


def test_accumulator_moves() -> None:
    def body(J: Any, x: Any) -> None:
        held = J.gpr("af32", 1.0)
        J.v_add_f32(held, held, held)
        J.global_store_dword(J.threadIdx.x * 4, held, x)

    after = code(built(body))
    at = after.index("v_add_f32 v1, v1, v1")
    assert [after[at - 1].split()[0], after[at + 1].split()[0]] == ["v_accvgpr_read_b32", "v_accvgpr_write_b32"]
    with pytest.raises(CompileError, match="held is an accumulator, where v_add_f32 takes a vector register"):
        built(body).without("accumulator_moves").source("gfx942")


def test_required_noops() -> None:
    def body(J: Any, x: Any) -> None:
        lane = J.gpr("su32")
        J.v_readfirstlane_b32(lane, J.threadIdx.x)
        J.v_readlane_b32("m0", J.threadIdx.x, lane)

    kernel = built(body)
    assert (count(code(kernel.without("required_noops")), "s_nop"), count(code(kernel), "s_nop")) == (0, 2)


def test_hide_stalls() -> None:
    """What is independent goes between a reciprocal and its use, and a load and its use."""

    def body(J: Any, x: Any) -> None:
        offset = J.gpr(J.threadIdx.x * 4)
        value, more = J.gpr("vf32"), J.gpr("vf32", 2.0)
        J.global_load_dword(value, offset, x)
        value[0] = value + 1.0
        J.v_rcp_f32(more, more)
        J.v_mul_f32(more, more, more)
        J.global_store_dword(offset, value * more, x)

    before, after = before_and_after(body, "hide_stalls")
    names = [[line.split()[0] for line in lines] for lines in (before, after)]
    assert names[0].index("v_add_f32") < names[0].index("v_rcp_f32")
    assert names[1].index("v_rcp_f32") < names[1].index("s_waitcnt", names[1].index("global_load_dword"))


def test_what_is_waited_for_by_the_kernel_stays_in_its_place() -> None:
    def body(J: Any, x: Any) -> None:
        a, b = J.gpr("vi32"), J.gpr("vi32", 3)
        J.global_load_dword(a, J.threadIdx.x * 4, x)
        J.s_waitcnt(mod="vmcnt(0)")
        b[0] = b * 11
        J.global_store_dword(J.threadIdx.x * 4, a + b, x)

    made = code(built(body, "checked"))
    at = made.index("s_waitcnt vmcnt(0)")
    assert made[at - 1].startswith("global_load_dword")
    assert any(line.startswith("v_mul_lo") for line in made[at:])


def test_hide_argument_loads() -> None:
    def body(J: Any, x: Any) -> None:
        offset = J.gpr(J.threadIdx.x * 4)
        J.global_store_dword(offset, offset, x)

    before, after = before_and_after(body, "hide_argument_loads")
    waits = [lines.index("s_waitcnt lgkmcnt(0)") for lines in (before, after)]
    shifts = [next(at for at, line in enumerate(lines) if "lshl" in line) for lines in (before, after)]
    assert waits[0] < shifts[0]
    assert waits[1] > shifts[1]


def test_a_kernel_that_uses_no_argument_waits_for_none() -> None:
    before, after = before_and_after(lambda J, x: J.s_sleep(1), "hide_argument_loads")
    assert (count(before, "s_waitcnt"), count(after, "s_waitcnt")) == (0, 0)


def test_split_arrays() -> None:
    """Each element has a place for itself, where no instruction holds several."""

    def body(J: Any, x: Any) -> None:
        first, second = J.gpr(4, "vi32"), J.gpr(4, "vi32")
        for at in range(4):
            J.global_load_dword(first[at], J.threadIdx.x * 4, x, mod=f"offset:{at * 4}")
        for at in range(4):
            second[at] = first[at] * 3
            J.global_store_dword(J.threadIdx.x * 4, second[at], x, mod=f"offset:{at * 4}")

    kernel = built(body)
    before, after = (one.ir("gfx942").registers for one in (kernel.without("split_arrays"), kernel))
    assert max(one.dwords for one in before if one.file == "v") == 4
    assert max(one.dwords for one in after if one.file == "v") == 1


def test_arrays_that_one_instruction_holds_stay_together() -> None:
    def body(J: Any, x: Any) -> None:
        four = J.gpr(8, "vi32")
        J.global_load_dwordx4(four[0:4], J.threadIdx.x * 16, x)
        J.global_load_dwordx2(four[4:6], J.threadIdx.x * 16, x)
        J.global_store_dwordx2(J.threadIdx.x * 16, four[2:4], x)
        J.global_store_dwordx2(J.threadIdx.x * 16, four[4:6], x, mod="offset:8")

    sizes = sorted(one.dwords for one in built(body).ir().registers if one.name == "four")
    assert sizes == [2, 4]


def test_linear_scan() -> None:
    def body(J: Any, x: Any) -> None:
        for at in range(6):
            one = J.gpr("vi32", at)
            J.global_store_dword(J.threadIdx.x * 4, one, x)

    kernel = built(body).without("common_subexpressions")
    disjoint = built(body).without("common_subexpressions", "linear_scan")
    assert kernel.compile("gfx942").vgprs < disjoint.compile("gfx942").vgprs


def test_where_registers_run_out_no_pass_holds_values_for_longer() -> None:
    """Beside what is held, loads that could be begun together would need more registers than there are."""

    def body(J: Any, x: Any) -> None:
        total, held = J.gpr(4, "vi32", 0), J.gpr(100, "vi32", 1)
        for at in range(8):
            J.ds_read_b128(four := J.gpr(4, "vi32"), J.threadIdx.x * 16, mod=f"offset:{at * 16}")
            J.ds_read_b128(other := J.gpr(4, "vi32"), J.threadIdx.x * 16, mod=f"offset:{at * 16 + 8192}")
            total[:] = total + four * other
        for at in range(25):
            total[:] = total + held[4 * at : 4 * at + 4]
        J.global_store_dwordx4(J.threadIdx.x * 16, total, x)

    kernel = built(body, threads=1024)
    assert kernel.compile("gfx942").vgprs <= 128
    assert [one.split(": ", 1)[1] for one in kernel.notes()] == [
        "common_subexpressions and hide_stalls: left out, as registers run out with them"
    ]


def test_a_pass_says_what_it_leaves() -> None:
    def jumps(J: Any, x: Any) -> None:
        where = J.gpr("su64", 0)
        J.gpr("vi32", 1)
        J.s_setpc_b64(where)  # away

    kernel = built(jumps)
    here = f"test_passes.py:{line_of('away')}"
    assert kernel.notes() == [
        f"{here}: {name}: the kernel is left as it is, as s_setpc_b64 goes where no pass can see"
        for name in pipeline.IMPROVING
    ]
    assert count(code(kernel), "v_mov_b32") == 1  # which nothing reads
    counted = built(stored_twice, "checked")
    assert count(code(counted), "global_store_dword") == 2
    assert [note.split(" stays")[0] for note in counted.notes()] == [
        f"test_passes.py:{line_of('the first')}: dead_stores: global_store_dword"
    ]


def test_a_long_kernel_is_put_in_order_piece_by_piece() -> None:
    def body(J: Any, x: Any) -> None:
        for at in range(90):
            four = J.gpr(4, "vi32", at)
            J.ds_write_b128(J.threadIdx.x * 16, four)
        J.v_rcp_f32(four[0], four[0])
        J.v_mul_f32(four[0], four[0], four[0])
        J.v_mov_b32(four[1], 5)
        J.ds_write_b128(J.threadIdx.x * 16, four)

    made = [line.split()[0] for line in code(built(body).without("common_subexpressions", "dead_stores"))]
    assert made.count("ds_write_b128") == 91
    assert made.index("v_mul_f32") - made.index("v_rcp_f32") > 1


def test_registers_at_a_run_time_index_are_an_error() -> None:
    def by_expression(J: Any, x: Any) -> None:
        rows = J.gpr(4, "vi32", 0)
        rows[J.threadIdx.x] = 1  # by an expression

    def by_instruction(J: Any, x: Any) -> None:
        J.s_set_gpr_idx_on(J.gpr("su32", 1), 1)  # by an instruction

    def by_slice(J: Any, x: Any) -> None:
        rows = J.gpr(4, "vi32", 0)
        with J.For(0, 4) as row:
            rows[row : row + 1] = 1  # by a slice

    each = {"by an expression": by_expression, "by an instruction": by_instruction, "by a slice": by_slice}
    for text, body in each.items():
        with pytest.raises(CompileError, match=rf"^test_passes\.py:{line_of(text)}: .*known at compile time"):
            built(body).ir()


def test_names_of_passes() -> None:
    assert set(PASSES) == {*pipeline.IMPROVING, "auto_waits", "linear_scan", "accumulator_moves", "required_noops"}
    for wrong in (["inlining"], "dead_code"):
        with pytest.raises(ArgumentError, match="of dead_blocks, common_subexpressions"):
            jit(without=wrong)
    with pytest.raises(ArgumentError, match=r"'checked'.*'auto'"):
        jit(waits="never")


def test_passes_are_left_out_one_after_the_other() -> None:
    kernel = built(stored_twice).without("dead_stores").without("hide_stalls")
    assert kernel.left_out == ("dead_stores", "hide_stalls")
    assert count(code(kernel), "global_store_dword") == 2


def test_a_kernel_without_what_it_needs_is_only_looked_at() -> None:
    kernel = built(stored_twice).without("required_noops")
    with pytest.raises(KernelError, match="without required_noops is wrong on a GPU"):
        kernel([1], [64], np.zeros(64, np.int32))
