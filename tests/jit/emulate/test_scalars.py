"""Scalar instructions and the flag that they leave, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accelpatch.jit.emulate import run
from tests.support.amdgcn import kernel

WORD = 0xFFFFFFFF
VALUES = st.integers(0, WORD) | st.sampled_from([0, 1, 31, 32, 0x7FFF, 0xFFFF, 1 << 16, 0x7FFFFFFF, 1 << 31, WORD])
CODE = """s_load_dwordx4 s[4:7], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
s_mov_b32 s9, 0
s_cmp_eq_u32 s4, s4
{}
s_cselect_b32 s10, 1, 0
s_store_dwordx2 s[8:9], s[6:7], 0x0
s_store_dword s10, s[6:7], 0x8
s_waitcnt lgkmcnt(0)
"""


def signed(a: int, bits: int = 32) -> int:
    return a - (a >> bits - 1 << bits)


def fits(value: int) -> int:
    return int(-(1 << 31) <= value < 1 << 31)


def field(a: int, b: int) -> int:
    offset, width = b & 31, min(b >> 16 & 0x7F, 32)
    return signed(signed(a) >> offset & (1 << width) - 1, width) if width else 0


#: code -> result of two words (the first is as it is where None), and scc, which is 1 before
SCALARS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "s_add_u32 s8, s4, s5": lambda a, b: (a + b, a + b >> 32),
    "s_addc_u32 s8, s4, s5": lambda a, b: (a + b + 1, a + b + 1 >> 32),
    "s_sub_u32 s8, s4, s5": lambda a, b: (a - b, b > a),
    "s_subb_u32 s8, s4, s5": lambda a, b: (a - b - 1, b + 1 > a),
    "s_add_i32 s8, s4, s5": lambda a, b: (a + b, 1 - fits(signed(a) + signed(b))),
    "s_sub_i32 s8, s4, s5": lambda a, b: (a - b, 1 - fits(signed(a) - signed(b))),
    "s_mul_i32 s8, s4, s5": lambda a, b: (a * b, 1),
    "s_mul_hi_u32 s8, s4, s5": lambda a, b: (a * b >> 32, 1),
    "s_mul_hi_i32 s8, s4, s5": lambda a, b: (signed(a) * signed(b) >> 32, 1),
    "s_min_i32 s8, s4, s5": lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_u32 s8, s4, s5": lambda a, b: (max(a, b), a >= b),
    "s_lshl_b32 s8, s4, s5": lambda a, b: (a << (b & 31), (a << (b & 31)) & WORD != 0),
    "s_ashr_i32 s8, s4, s5": lambda a, b: (signed(a) >> (b & 31), signed(a) >> (b & 31) != 0),
    "s_lshl_b64 s[8:9], s[4:5], 7": lambda a, b: ((a | b << 32) << 7, (a | b << 32) << 7 & (1 << 64) - 1 != 0),
    "s_andn2_b32 s8, s4, s5": lambda a, b: (a & ~b, a & ~b != 0),
    "s_xnor_b32 s8, s4, s5": lambda a, b: (~(a ^ b), a ^ b != WORD),
    "s_bfe_i32 s8, s4, s5": lambda a, b: (field(a, b), field(a, b) != 0),
    "s_bfm_b32 s8, s4, s5": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), 1),
    "s_flbit_i32_b32 s8, s4": lambda a, b: (32 - a.bit_length() if a else -1, 1),
    "s_ff1_i32_b64 s8, s[4:5]": lambda a, b: (((v := a | b << 32) & -v).bit_length() - 1, 1),
    "s_bcnt1_i32_b64 s8, s[4:5]": lambda a, b: (a.bit_count() + b.bit_count(), a | b != 0),
    "s_sext_i32_i16 s8, s4": lambda a, b: (signed(a & 0xFFFF, 16), 1),
    "s_movk_i32 s8, 0xff80": lambda a, b: (-128, 1),
    "s_mov_b64 s[8:9], 0x87654321": lambda a, b: (0x87654321, 1),
    "s_mov_b64 s[8:9], -5": lambda a, b: ((1 << 64) - 5, 1),
    "s_mov_b32 s8, 1.0": lambda a, b: (0x3F800000, 1),
    "s_mov_b32 s8, s4\n s_addk_i32 s8, 0x8000": lambda a, b: (a - 0x8000, 1 - fits(signed(a) - 0x8000)),
    "s_cmp_lt_i32 s4, s5\n s_cselect_b32 s8, s4, s5": lambda a, b: (
        min(signed(a), signed(b)),
        signed(a) < signed(b),
    ),
    "s_cmpk_gt_u32 s4, 0xfffe\n s_mov_b32 s8, 0": lambda a, b: (0, a > 0xFFFE),
    "s_cmpk_lt_i32 s4, 0xfffe\n s_mov_b32 s8, 0": lambda a, b: (0, signed(a) < -2),
    "s_bitcmp1_b32 s4, s5\n s_mov_b32 s8, 0": lambda a, b: (0, a >> (b & 31) & 1),
    "s_mov_b64 exec, s[4:5]\n s_or_saveexec_b64 s[8:9], 3\n s_mov_b64 exec, -1": lambda a, b: (a | b << 32, 1),
    "s_pack_lh_b32_b16 s8, s4, s5": lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, 1),
}


@pytest.mark.parametrize("code", SCALARS)
@settings(max_examples=8, deadline=None)
@example(WORD, 1)
@example(WORD, 0)
@example(0, 0)
@example(0xFFFE, 1 << 31)
@given(a=VALUES, b=VALUES)
def test_a_scalar_instruction(code: str, a: int, b: int) -> None:
    out = np.zeros(3, np.uint32)
    arguments = [("u32", a), ("u32", b), ("global_buffer", out)]
    run(kernel(CODE.format(code), "4 4 8"), "k", [1], [64], arguments, arch="gfx942")
    result, scc = SCALARS[code](a, b)
    words = 2 if "s[8:9]" in code else 1
    assert out.view(np.uint32)[:2].tolist() == [result & WORD, result >> 32 & WORD if words == 2 else 0]
    assert int(out[2]) == int(scc)
