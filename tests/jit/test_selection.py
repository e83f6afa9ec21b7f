"""The instructions that expressions become: as few and as cheap as the arch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accelpatch.jit import jit
from tests.support.jit_kernels import names

Body = Callable[[Any, Any, Any, Any], Any]
VECTOR: dict[str, tuple[Body, list[str]]] = {
    "shift and add": (lambda J, a, b, s: (a << 3) + b, ["v_lshl_add_u32"]),
    "power of two and add": (lambda J, a, b, s: a * 8 + b, ["v_lshl_add_u32"]),
    "three summands": (lambda J, a, b, s: a + b + s, ["v_add3_u32"]),
    "times nine": (lambda J, a, b, s: a * 9, ["v_lshl_add_u32"]),
    "times seven": (lambda J, a, b, s: a * 7, ["v_lshlrev_b32", "v_sub_u32"]),
    "times sixteen": (lambda J, a, b, s: a * 16, ["v_lshlrev_b32"]),
    "sum shifted": (lambda J, a, b, s: (a + b) << 2, ["v_add_lshl_u32"]),
    "or of three": (lambda J, a, b, s: a | b | s, ["v_or3_b32"]),
    "and, or": (lambda J, a, b, s: (a & b) | s, ["v_and_or_b32"]),
    "xor, add": (lambda J, a, b, s: (a ^ b) + s, ["v_xad_u32"]),
    "bit field": (lambda J, a, b, s: (a.to("u32") >> 4) & 0xFF, ["v_bfe_u32"]),
    "literal": (lambda J, a, b, s: a + 1000, ["v_add_u32"]),
    "literal on the left": (lambda J, a, b, s: 1000 - a, ["v_sub_u32"]),
    "minus a scalar": (lambda J, a, b, s: a - s, ["v_subrev_u32"]),
    "constants are put together": (lambda J, a, b, s: a + 3 + 4 - 2, ["v_add_u32"]),
    "nothing": (lambda J, a, b, s: (a + 0) * 1, []),
    "unsigned quarter": (lambda J, a, b, s: a.to("u32") / 4, ["v_lshrrev_b32"]),
    "unsigned rest": (lambda J, a, b, s: a.to("u32") % 4, ["v_and_b32"]),
    "unsigned third": (lambda J, a, b, s: a.to("u32") / 3, ["s_mov_b32", "v_mul_hi_u32", "v_lshrrev_b32"]),
    "widened address": (lambda J, a, b, s: a.to("u32").to("u64") * 16, ["v_mov_b32", "v_mov_b32", "v_lshlrev_b64"]),
}
SCALAR: dict[str, tuple[Body, list[str]]] = {
    "shift and add": (lambda J, a, b, s: (s << 3) + s, ["s_lshl3_add_u32"]),
    "times five": (lambda J, a, b, s: s * 5, ["s_lshl2_add_u32"]),
    "times a thousand": (lambda J, a, b, s: s * 1000, ["s_mul_i32"]),
    "and not": (lambda J, a, b, s: s & ~J.gpr("si32", s), ["s_mov_b32", "s_andn2_b32"]),
    "bit field": (lambda J, a, b, s: (s >> 3) & 7, ["s_bfe_u32"]),
    "small constant": (lambda J, a, b, s: J.gpr("si32", 1000), ["s_movk_i32", "s_mov_b32"]),
}


@pytest.mark.parametrize("file, body, expected", [
    pytest.param(file, *case, id=f"{file}: {name}")
    for file, cases in (("v", VECTOR), ("s", SCALAR)) for name, case in cases.items()
])  # fmt: skip
def test_the_sequence(file: str, body: Body, expected: list[str]) -> None:
    def kernel(J, x: "int*"):
        a, b, s = J.gpr("vi32"), J.gpr("vi32"), J.gpr("si32")
        J.global_load_dword(a, J.threadIdx.x, x)
        J.global_load_dword(b, J.threadIdx.x, x)
        J.s_load_dword(s, x, 0)
        J.s_waitcnt(mod="vmcnt(0) lgkmcnt(0)")
        made = body(J, a, b, s)
        held = J.gpr(f"{file}{made.type}", made) if made is not a else a
        if file == "v":
            (J.global_store_dwordx2 if held.dwords == 2 else J.global_store_dword)(J.threadIdx.x, held, x)
        else:
            J.s_store_dword(held, x, 0)

    assert names(kernel) == expected


def test_64_bit_addresses_are_one_instruction_from_gfx942_on() -> None:
    def kernel(J, x: "int*"):
        at = J.gpr("vu64", J.threadIdx.x.to("u64"))
        at[0] = (at << 2) + x
        J.global_store_dword(at, J.threadIdx.x, "off")

    assert "v_lshl_add_u64" in names(kernel, "gfx942")
    assert {"v_add_co_u32", "v_addc_co_u32", "v_lshlrev_b64"} <= set(names(kernel, "gfx90a"))


@pytest.mark.parametrize("condition, expected", [
    pytest.param(lambda s: (s & 4) == 0, ["s_bitcmp0_b32", "s_cbranch_scc0"], id="a bit"),
    pytest.param(lambda s: (s & 6) != 0, ["s_and_b32", "s_cbranch_scc0"], id="bits"),
    pytest.param(lambda s: (s < 3) & (s > 0), ["s_cmp_lt_i32", "s_cbranch_scc0", "s_cmp_gt_i32", "s_cbranch_scc0"],
                 id="and"),
    pytest.param(lambda s: ~((s < 3) | (s == 9)), ["s_cmp_lt_i32", "s_cbranch_scc1", "s_cmp_eq_i32", "s_cbranch_scc1"],
                 id="not or"),
])  # fmt: skip
def test_conditions_of_scalars_are_branches(condition: Callable[[Any], Any], expected: list[str]) -> None:
    def kernel(J, x: "int*"):
        s = J.gpr("si32")
        J.s_load_dword(s, x, 0)
        J.s_waitcnt(mod="lgkmcnt(0)")
        with J.If(condition(s)):
            J.s_store_dword(s, x, 4)

    program = jit()(kernel).ir()
    made = [one.name for one in program.instructions() if one.form.unit in ("salu", "control")]
    assert made[: len(expected) + 2][2:] == expected


def test_multiply_and_add_goes_into_its_addend() -> None:
    def kernel(J, x: "float*"):
        a, total = J.gpr("vf32"), J.gpr("vf32", 0.0)
        J.global_load_dword(a, J.threadIdx.x, x)
        J.s_waitcnt(mod="vmcnt(0)")
        total[0] = a * a + total
        J.global_store_dword(J.threadIdx.x, total, x)

    assert "v_fmac_f32" in names(kernel)


def test_a_sign_is_a_modifier() -> None:
    def kernel(J, x: "float*"):
        a = J.gpr("vf32")
        J.global_load_dword(a, J.threadIdx.x, x)
        J.s_waitcnt(mod="vmcnt(0)")
        J.v_fma_f32(a, -a, abs(a), 1.0)
        J.global_store_dword(J.threadIdx.x, a, x)

    assert "v_fma_f32 v1, -v1, |v1|, 1.0" in jit()(kernel).source("gfx942")


def test_arrays_of_floats_are_computed_in_pairs() -> None:
    def kernel(J, x: "float*"):
        a, b, c = (J.gpr(5, "vf32") for _ in range(3))
        for one in (a, b):
            J.global_load_dwordx4(one[0:4], J.threadIdx.x, x)
            J.global_load_dword(one[4], J.threadIdx.x, x)
        J.s_waitcnt(mod="vmcnt(0)")
        c[:] = a + b
        c[:] = a * b + c
        c[1:] = c[1:] * b[1:]
        J.global_store_dwordx4(J.threadIdx.x, c[0:4], x)
        J.global_store_dword(J.threadIdx.x, c[4], x)

    made = names(kernel)
    assert made[:6] == ["v_pk_add_f32", "v_pk_add_f32", "v_add_f32", "v_pk_fma_f32", "v_pk_fma_f32", "v_fmac_f32"]
    assert made[6:] == ["v_mul_f32", "v_pk_mul_f32", "v_mul_f32"]
