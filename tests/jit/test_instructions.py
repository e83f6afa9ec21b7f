"""Instructions by name: their forms, modifiers and operands, and what is said of those that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import jit

HERE = Path(__file__)


def program(function: Callable[..., None], arch: str = "gfx942") -> str:
    return jit()(function).source(arch)


def test_any_instruction_with_modifiers() -> None:
    def kernel(J, x: "float*"):
        a, pair, four = J.gpr("vf32", 1.0), J.gpr(2, "vf32", 0.0), J.gpr(4, "af32", 0.0)
        J.v_add_f32(a, a, a, mod="row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0")
        J.v_pk_fma_f32(pair, pair, pair, pair, mod="op_sel_hi:[0,1,1]")
        J.v_mfma_f32_16x16x4f32(four, a, pair[1], four, mod="cbsz:1 abid:1")
        J.v_add_f32_e64(a, a, 2.0, mod="clamp mul:2")
        J.v_cmp_lt_f32("vcc", 0.5, a)
        J.v_cndmask_b32(a, 0, a, "vcc")
        J.ds_read2_b32(pair, a, mod="offset0:1 offset1:3")
        J.s_waitcnt("lgkmcnt(0)")
        J.global_atomic_add_f32(a, a, x)
        J.global_atomic_add_f32(pair[0], a, pair[1], x, mod="sc0")
        J.s_waitcnt(mod="vmcnt(0)")
        J.s_setreg_imm32_b32("hwreg(HW_REG_MODE, 0, 4)", 3)
        J.global_store_dwordx2(a, pair, x)
        J.global_store_dword(a, four.view("f32")[1], x)

    text = program(kernel)
    for line in (
        "v_add_f32 v0, v0, v0 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0", "op_sel_hi:[0,1,1]",
        "a[0:3] cbsz:1 abid:1", "v_add_f32_e64 v0, v0, 2.0 clamp mul:2", "v_cmp_lt_f32 vcc, 0.5, v0",
        "v_cndmask_b32 v0, 0, v0, vcc", "offset0:1 offset1:3", "hwreg(HW_REG_MODE, 0, 4), 3", ", s[2:3] sc0",
    ):  # fmt: skip
        assert line in text
    jit()(kernel).compile("gfx942")


def wide(J: Any) -> None:
    J.global_load_dwordx4(J.gpr(2, "vf32"), J.threadIdx.x, J.gpr("su64", 0))  # wide


def odd(J: Any) -> None:
    J.global_load_dwordx2(J.gpr(4, "vf32")[1:3], J.threadIdx.x, J.gpr("su64", 0))  # odd


def lacks(J: Any) -> None:
    J.v_cvt_pk_bf16_f32(J.gpr("vu32"), J.threadIdx.x, J.threadIdx.x)  # lacks


def unknown(J: Any) -> None:
    J.v_add_f33(J.gpr("vf32"), 1.0, 2.0)  # unknown


def few(J: Any) -> None:
    J.v_add_f32(J.gpr("vf32"), 1.0)  # few


def scalar(J: Any) -> None:
    J.s_add_u32(J.gpr("su32"), J.threadIdx.x, 1)  # scalar


def literals(J: Any) -> None:
    J.s_add_u32(J.gpr("su32"), 1000, J.gpr("vu32"))  # literals


def bus(J: Any) -> None:
    J.v_add3_u32(J.gpr("vu32"), J.blockIdx.x, J.blockIdx.y, 1)  # bus


def room(J: Any) -> None:
    J.v_add3_u32(J.gpr("vu32"), J.threadIdx.x, 1000, 1)  # room


def constant(J: Any) -> None:
    J.v_add_f32(1.0, J.gpr("vf32", 0.0), 1.0)  # constant


def expression(J: Any) -> None:
    J.v_add_u32(J.threadIdx.x + 1, J.threadIdx.x, 1)  # expression


def offset(J: Any) -> None:
    J.ds_read_b64(J.gpr(2, "vu32"), J.threadIdx.x, mod="offset:12")  # offset


def scalar_offset(J: Any) -> None:
    J.s_load_dword(J.gpr("su32"), J.gpr("su64", 0), 6)  # scalar_offset


def no_register(J: Any) -> None:
    J.v_mov_b32(J.gpr("vf32"), [1])  # no_register


def branch(J: Any) -> None:
    J.s_cbranch_scc0("there")  # branch


@pytest.mark.parametrize("kernel, message", [
    (branch, "s_cbranch_scc0 goes to a label, which a kernel has none of: use J.If"),
    (wide, "operand 1 of global_load_dwordx4 is .*: it takes 4 of 32 bits, not 2"),
    (odd, "takes registers that begin at a multiple of 2; .* begins at element 1, misaligned"),
    (lacks, "gfx942 has no v_cvt_pk_bf16_f32: it is an instruction of gfx950"),
    (unknown, "there is no instruction v_add_f33: is it v_add_f32,"),
    (few, r"v_add_f32 takes 3 operands \(v1, v/s/i/l1, v/s/i1\), not 2 operands"),
    (scalar, r"operand 2 of s_add_u32 is threadIdx.x .*: it takes a scalar register or an inline constant"),
    (literals, "operand 3 of s_add_u32 is a register"),
    (bus, "v_add3_u32 reads 2 scalar registers and 0 literals: it can read one of all"),
    (room, "it takes a vector register or a scalar register or an inline constant, and no constant but -16 to 64"),
    (constant, "operand 1 of v_add_f32 is 1.0: it is written, so it takes a vector register"),
    (expression, "v_add_u32 writes that operand: give registers, not an expression"),
    (offset, "ds_read_b64 has offset 12, misaligned: it must be a multiple of 8"),
    (scalar_offset, "s_load_dword has offset 6, misaligned: it must be a multiple of 4"),
    (no_register, r"\[1\] is neither a register nor a number"),
], ids=lambda one: getattr(one, "__name__", ""))  # fmt: skip
def test_what_cannot_stand_there_names_the_line(kernel: Callable[..., None], message: str) -> None:
    lines = HERE.read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.endswith(f"# {kernel.__name__}"))
    with pytest.raises(CompileError, match=rf"^test_instructions\.py:{number}: .*{message}"):
        program(kernel)


def test_the_assembler_s_errors_name_the_line_too() -> None:
    def kernel(J):
        J.s_nop("five")

    with pytest.raises(CompileError, match=r"test_instructions\.py:\d+: .*: s_nop five"):
        jit()(kernel).compile("gfx942")


def test_an_instruction_of_one_arch() -> None:
    def kernel(J, out: "int*"):
        J.global_store_dword(J.threadIdx.x, J.gpr("vf32", 1.0).to("bf16"), out)

    assert "v_cvt_pk_bf16_f32" in program(kernel, "gfx950")
    assert "v_cvt_pk_bf16_f32" not in program(kernel, "gfx942")


def test_an_arch_that_nobody_knows() -> None:
    with pytest.raises(CompileError, match="arch 'gfx1100' is none that the jit knows: gfx90a, gfx942, gfx950"):
        program(lambda J: None, "gfx1100")


def test_lines_of_functions_that_a_kernel_calls() -> None:
    """Instructions carry the innermost line that is the user's."""
    text = program(lambda J: wait(J))
    number = next(at for at, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith("# wait"))
    assert re.search(rf"s_nop 3\t// test_instructions\.py:{number}$", text, re.MULTILINE)


def wait(J: Any) -> None:
    J.s_nop(3)  # wait
