"""Wait states between instructions that the hardware does not keep apart, arch by arch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from accelpatch.jit import jit
from accelpatch.jit.ir import Instruction
from accelpatch.jit.passes.matrix import is_xdl, matrix_passes

Body = Callable[[Any, Any], None]


def scalar_to_memory(J: Any, a: Any) -> None:
    address = J.gpr("su64", 0)
    J.v_readfirstlane_b32(address.view("u32")[0], a)
    J.global_store_dword(J.threadIdx.x, a, address)


def scalar_to_memory_later(J: Any, a: Any) -> None:
    address = J.gpr("su64", 0)
    J.v_readfirstlane_b32(address.view("u32")[0], a)
    J.s_nop(1)
    J.s_barrier()
    J.global_store_dword(J.threadIdx.x, a, address)


def scalar_to_vector(J: Any, a: Any) -> None:
    J.v_cmp_lt_f32("vcc", a, a)
    J.v_cndmask_b32(a, 0, a, "vcc")
    J.s_setreg_imm32_b32("hwreg(HW_REG_MODE)", 0)


def lane_select(J: Any, a: Any) -> None:
    lane = J.gpr("su32")
    J.v_readfirstlane_b32(lane, a)
    J.v_readlane_b32("m0", a, lane)


def transcendental(J: Any, a: Any) -> None:
    J.v_rcp_f32(a, a)
    J.v_readfirstlane_b32("m0", a)


def exec_to_matrix(J: Any, a: Any) -> None:
    four = J.gpr(4, "vf32", 0.0)
    J.v_cmpx_lt_f32("vcc", a, a)
    J.v_mfma_f32_16x16x4f32(four, a, a, four)
    J.ds_write_b32(a, four[0])


def m0_to_lds(J: Any, a: Any) -> None:
    J.s_mov_b32("m0", 0)
    J.ds_read_addtid_b32(J.gpr("vu32"))


def wide_store(J: Any, a: Any) -> None:
    four = J.gpr(4, "vf32", 0.0)
    J.global_store_dwordx4(J.threadIdx.x, four, J.gpr("su64", 0))
    J.v_ceil_f32(four[1], 2.0)
    J.ds_write_b128(J.threadIdx.x, four)


def double(J: Any, a: Any) -> None:
    pair = J.gpr(2, "vf64", 0.0)
    J.v_mfma_f64_4x4x4f64(pair[0], pair[1], pair[1], pair[0])
    J.s_nop(15)
    J.v_ceil_f32(a, a)
    J.ds_write_b32(a, a)


#: every instruction stays, in its order
as_written = jit(without=("dead_code", "common_subexpressions", "hide_stalls"))


def before(body: Body, name: str, arch: str) -> int:
    """Wait states before the first instruction of a name."""
    made = list(as_written(lambda J: body(J, J.gpr("vf32", 1.0))).ir(arch).instructions())
    at = next(number for number, one in enumerate(made) if one.name == name)
    return waited(made[:at][::-1])


@pytest.mark.parametrize("body, name, expected", [
    pytest.param(scalar_to_memory, "global_store_dword", {"gfx90a": 5, "gfx942": 5}, id="scalar, memory"),
    pytest.param(scalar_to_vector, "v_cndmask_b32", {"gfx90a": 0, "gfx942": 2}, id="mask, vector"),
    pytest.param(lane_select, "v_readlane_b32", {"gfx90a": 4, "gfx942": 4}, id="scalar, lane select"),
    pytest.param(transcendental, "v_readfirstlane_b32", {"gfx90a": 0, "gfx942": 1}, id="reciprocal, vector"),
    pytest.param(exec_to_matrix, "v_mfma_f32_16x16x4f32", {"gfx90a": 4, "gfx942": 4}, id="exec, matrix"),
    pytest.param(m0_to_lds, "ds_read_addtid_b32", {"gfx90a": 1, "gfx942": 1}, id="m0, LDS"),
    pytest.param(wide_store, "v_ceil_f32", {"gfx90a": 1, "gfx942": 2}, id="store of four, overwritten"),
    pytest.param(double, "ds_write_b32", {"gfx90a": 2, "gfx942": 0}, id="vector, memory, and a product of 64 bits"),
])  # fmt: skip
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_wait_states(body: Body, name: str, expected: dict[str, int], arch: str) -> None:
    assert before(body, name, arch) == expected[arch]


def test_what_lies_between_counts() -> None:
    """The barrier and the user's own s_nop are three of the five."""
    made = [one.text for one in as_written(lambda J: scalar_to_memory_later(J, J.gpr("vf32", 1.0))).ir().instructions()]
    assert made[-4:-1] == ["s_barrier", "s_nop 1", made[-2]]


def matrix(J: Any, name: str, use: str) -> None:
    a, result = J.gpr(2, "vu32", 0), J.gpr(4, "vf32", 0.0)
    getattr(J, name)(result, a, a, result)
    if use == "chain":
        getattr(J, name)(result, a, a, result)
    elif use == "factor":
        getattr(J, name)(J.gpr(4, "vf32"), result.view("u32")[0:2], a, 0)
    elif use == "overwrite":
        J.v_mov_b32(result[0], 1.0)
    else:
        J.ds_write_b32(a[0], result[0])


@pytest.mark.parametrize("use, expected", [
    ("chain", {"gfx90a": 0, "gfx942": 0, "gfx950": 0}), ("factor", {"gfx90a": 11, "gfx942": 7, "gfx950": 8}),
    ("overwrite", {"gfx90a": 11, "gfx942": 7, "gfx950": 8}), ("LDS", {"gfx90a": 11, "gfx942": 7, "gfx950": 8}),
])  # fmt: skip
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_results_of_matrix_instructions(use: str, expected: dict[str, int], arch: str) -> None:
    name = "v_mfma_f32_16x16x16bf16_1k"
    made = list(as_written(lambda J: matrix(J, name, use)).ir(arch).instructions())
    at = next(number for number, one in enumerate(made) if one.name == name)
    assert waited(made[at + 1 :]) == expected[arch]


def waited(instructions: Sequence[Instruction]) -> int:
    """Wait states at the start."""
    count = 0
    for one in instructions:
        if one.name != "s_nop":
            return count
        count += int(str(one.operands[0])) + 1
    return count


def test_a_loop_s_end_is_before_its_start() -> None:
    """What the last instruction of a round asks for is kept before the first one of the next."""

    def kernel(J, x: "int*"):
        a, lane = J.gpr("vu32", 0), J.gpr("su32", 0)
        with J.For(0, 3):
            J.v_readlane_b32("m0", a, lane)
            J.v_readfirstlane_b32(lane, a)

    loop = next(block for block in as_written(kernel).ir().blocks if block.label.startswith("loop"))
    assert loop.instructions[0].name == "s_nop"


@pytest.mark.parametrize("name, expected", [
    ("v_mfma_f32_16x16x16_f16", (4, True)), ("v_mfma_f32_32x32x8_f16", (8, True)),
    ("v_mfma_f32_32x32x1_2b_f32", (16, False)), ("v_mfma_f32_16x16x4_f32", (8, False)),
    ("v_mfma_f32_16x16x8_xf32", (4, True)), ("v_mfma_f64_16x16x4_f64", (8, False)),
    ("v_mfma_i32_32x32x16_i8", (8, True)), ("v_mfma_f32_4x4x4_16b_f16", (2, True)),
])  # fmt: skip
def test_passes(name: str, expected: tuple[int, bool]) -> None:
    assert (matrix_passes(name, "gfx942"), is_xdl(name, "gfx942")) == expected
