"""Single instructions, on values of hypothesis's choosing in each lane, against Python's integers; forms that clang
seldom writes: DPP, SDWA, op_sel, packed and 8-bit floats, broadcasts of matrix instructions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelpatch.jit.emulate import run
from tests.support.amdgcn import kernel

LANE = np.arange(64)
WORD = 0xFFFFFFFF
WORDS = st.lists(
    st.integers(0, WORD) | st.sampled_from([0, 1, 31, 32, 0x7FFFFFFF, 1 << 31, WORD]), min_size=9, max_size=9
)
SEEDS = st.integers(0, 1 << 30)
LOAD = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
s_waitcnt lgkmcnt(0)
global_load_dwordx4 v[4:7], v1, s[4:5]
v_mov_b32 v12, 0x11223344
v_mov_b32 v13, 0x55667788
s_mov_b64 vcc, 0x0ff0
s_waitcnt vmcnt(0)
"""
STORE = "\ns_nop 4\nv_mov_b32 v14, vcc_lo\nv_mov_b32 v15, vcc_hi\nglobal_store_dwordx4 v1, v[12:15], s[6:7]\n"


def run_lanes(code: str, inputs: np.ndarray, arch: str = "gfx942") -> np.ndarray:
    """inputs: uint32[64, 4] in v4 to v7. uint32[64, 4]: v12, v13, vcc_lo, vcc_hi after the code."""
    out = np.zeros((64, 4), np.uint32)
    arguments = [("global_buffer", np.ascontiguousarray(inputs, np.uint32)), ("global_buffer", out)]
    run(kernel(LOAD + code + STORE, "8 8", arch), "k", [1], [64], arguments, arch=arch)
    return out


def spread(words: list[int], seed: int) -> np.ndarray:
    """Lanes made of a few chosen words, in an order of their own each."""
    return np.random.default_rng(seed).choice(np.array(words, np.uint32), (64, 4))


def signed(a: int, bits: int = 32) -> int:
    return a - (a >> bits - 1 << bits)


INTEGERS: dict[str, Callable[[int, int, int], int]] = {
    "v_add3_u32 v12, v4, v5, v6": lambda a, b, c: a + b + c,
    "v_lshl_add_u32 v12, v4, v5, v6": lambda a, b, c: (a << (b & 31)) + c,
    "v_bfe_u32 v12, v4, v5, v6": lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1,
    "v_bfi_b32 v12, v4, v5, v6": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32 v12, v4, v5, v6": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_ashrrev_i32 v12, v4, v5": lambda a, b, c: signed(b) >> (a & 31),
    "v_mad_u32_u24 v12, v4, v5, v6": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mul_hi_i32 v12, v4, v5": lambda a, b, c: signed(a) * signed(b) >> 32,
    "v_med3_i32 v12, v4, v5, v6": lambda a, b, c: sorted(map(signed, (a, b, c)))[1],
    "v_ffbh_u32 v12, v4": lambda a, b, c: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32 v12, v4": lambda a, b, c: (a & -a).bit_length() - 1,
    "v_bcnt_u32_b32 v12, v4, v5": lambda a, b, c: a.bit_count() + b,
    "v_sad_u8 v12, v4, v5, v6": lambda a, b, c: sum(abs((a >> s & 255) - (b >> s & 255)) for s in range(0, 32, 8)) + c,
    "v_xad_u32 v12, v4, v5, v6": lambda a, b, c: (a ^ b) + c,
    "v_mov_b32 v12, v4 src0_sel:BYTE_2 dst_sel:DWORD dst_unused:UNUSED_PAD": lambda a, b, c: a >> 16 & 255,
    "v_add_u32 v12, sext(v4), v5 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:WORD_1": (
        lambda a, b, c: (signed(a >> 24, 8) + (b >> 16) & 0xFFFF) << 16 | 0x3344
    ),
    "v_add_u32 v12, v4, v5 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:DWORD src1_sel:DWORD": (
        lambda a, b, c: signed(a + b & 255, 8) << 8
    ),
}


@pytest.mark.parametrize("code", INTEGERS)
@settings(max_examples=8, deadline=None)
@given(words=WORDS, seed=SEEDS)
def test_integers(code: str, words: list[int], seed: int) -> None:
    inputs = spread(words, seed)
    wanted = [INTEGERS[code](*map(int, row[:3])) & WORD for row in inputs]
    assert run_lanes(code, inputs)[:, 0].tolist() == wanted


@settings(max_examples=10, deadline=None)
@given(words=WORDS, seed=SEEDS)
def test_carries(words: list[int], seed: int) -> None:
    inputs = spread(words, seed)
    code = "v_sub_co_u32 v12, vcc, v4, v6\n s_nop 1\n v_subb_co_u32 v13, vcc, v5, v7, vcc"
    out = run_lanes(code, inputs)
    pairs = [(int(a | b << 32), int(c | d << 32)) for a, b, c, d in inputs.astype(np.uint64)]
    assert out[:, :2].copy().view(np.uint64)[:, 0].tolist() == [(a - b) % (1 << 64) for a, b in pairs]
    borrowed = sum(1 << lane for lane, (a, b) in enumerate(pairs) if a < b)
    assert (int(out[0, 2]) | int(out[0, 3]) << 32) == borrowed


@settings(max_examples=10, deadline=None)
@given(words=WORDS, seed=SEEDS)
def test_the_carry_of_a_sum_of_64_bits(words: list[int], seed: int) -> None:
    inputs = spread(words, seed)
    inputs[::4, 2:] = 0
    out = run_lanes("v_mad_u64_u32 v[12:13], vcc, v4, v5, v[6:7]", inputs)
    sums = [int(a) * int(b) + (int(c) | int(d) << 32) for a, b, c, d in inputs]
    assert out[:, :2].copy().view(np.uint64)[:, 0].tolist() == [one % (1 << 64) for one in sums]
    assert (int(out[0, 2]) | int(out[0, 3]) << 32) == sum(1 << lane for lane, one in enumerate(sums) if one >> 64)


def test_signs_of_operands() -> None:
    """-x and |x| change the sign bit alone, in this order inside out; clamp makes 0 of NaN."""
    inputs = np.random.default_rng(4).standard_normal((64, 4)).astype(np.float32)
    inputs[0], inputs[1] = np.nan, -0.0
    a, b = inputs[:, 0], inputs[:, 1]
    for code, wanted in (
        ("v_add_f32 v12, -v4, v5", b - a),
        ("v_add_f32 v12, |v4|, -|v5|", np.abs(a) - np.abs(b)),
        ("v_mul_f32 v12, v4, -|v5|", a * -np.abs(b)),
        ("v_max_f32 v12, -v4, -v4", -a),
        ("v_add_f32 v12, v4, v5 clamp", np.nan_to_num(np.clip(a + b, 0, 1), nan=0)),
    ):
        found = run_lanes(code, inputs.view(np.uint32))[:, 0].copy().view(np.float32)
        assert np.array_equal(found, wanted, equal_nan=True), code


ROW = LANE & ~15
DPP = {
    "quad_perm:[2,0,3,3]": (LANE & ~3) + np.array([2, 0, 3, 3])[LANE & 3],
    "row_shl:2": np.where(LANE % 16 < 14, LANE + 2, -1),
    "row_shr:3": np.where(LANE % 16 > 2, LANE - 3, -1),
    "row_ror:5": ROW + (LANE - 5) % 16,
    "row_mirror": ROW + 15 - LANE % 16,
    "row_half_mirror": LANE ^ 7,
    "row_bcast:15": np.where(LANE > 15, ROW - 1, -1),
    "row_bcast:31": np.where(LANE > 31, 31, -1),
    "row_newbcast:4": ROW + 4,
    "wave_shl:1": np.where(LANE < 63, LANE + 1, -1),
    "wave_ror:1": (LANE - 1) % 64,
}


@pytest.mark.parametrize("zero", [False, True], ids=["keeps", "zero"])
@pytest.mark.parametrize("control", DPP)
def test_dpp(control: str, zero: bool) -> None:
    """Lanes without a source keep what they had, or read zero; those outside the masks keep it too."""
    inputs = np.arange(256, dtype=np.uint32).reshape(64, 4)
    bound = " bound_ctrl:0" if zero else ""
    out = run_lanes(f"v_mov_b32_dpp v12, v4 {control} row_mask:0xe bank_mask:0xb{bound}", inputs)[:, 0]
    source = DPP[control]
    moved = np.where(source >= 0, inputs[source, 0], 0 if zero else 0x11223344)
    chosen = (LANE >= 16) & (LANE // 4 % 4 != 2)
    assert out.tolist() == np.where(chosen, moved, 0x11223344).tolist()


def test_halves_of_registers() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((64, 8)).astype(np.float16)
    inputs = values.view(np.uint32)
    low, high = values[:, ::2].astype(np.float64), values[:, 1::2].astype(np.float64)

    def halves(code: str) -> np.ndarray:
        return run_lanes(code, inputs)[:, :1].copy().view(np.float16)

    kept = np.array([0x3344, 0x1122], np.uint16).view(np.float16)
    out = halves("v_fma_f16 v12, v4, v5, v6 op_sel:[1,0,1,1]")
    assert np.array_equal(out[:, 1], (high[:, 0] * low[:, 1] + high[:, 2]).astype(np.float16))
    assert (out[:, 0] == kept[0]).all()
    out = halves("v_pk_fma_f16 v12, v4, v5, v6 op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0] neg_hi:[0,0,1]")
    assert np.array_equal(out[:, 0], (-high[:, 0] * low[:, 1] + low[:, 2]).astype(np.float16))
    assert np.array_equal(out[:, 1], (low[:, 0] * high[:, 1] - high[:, 2]).astype(np.float16))
    out = halves("v_fma_mixhi_f16 v12, v4, v5, v6 op_sel:[1,1,0] op_sel_hi:[1,1,1]")
    assert np.array_equal(out[:, 1], (high[:, 0] * high[:, 1] + low[:, 2]).astype(np.float32).astype(np.float16))
    assert (out[:, 0] == kept[0]).all()
    out = halves("v_add_f16 v12, v4, v5")
    assert np.array_equal(out[:, 0], values[:, 0] + values[:, 2])
    assert (out[:, 1] == 0).all()


def test_8_bit_floats_are_torchs() -> None:
    rng = np.random.default_rng(1)
    inputs = (rng.standard_normal((64, 4)) * np.exp2(rng.uniform(-9, 6, (64, 4)))).astype(np.float32)
    inputs[:32] = (1 + np.arange(128).reshape(32, 4) / 32) / 4  # of these many lie half way between two
    for name, dtype in (("fp8", torch.float8_e4m3fnuz), ("bf8", torch.float8_e5m2fnuz)):
        code = f"v_cvt_pk_{name}_f32 v12, v4, v5\n v_cvt_pk_{name}_f32 v12, v6, v7 op_sel:[0,0,1]\n s_nop 0\n"
        out = run_lanes(f"{code}v_cvt_f32_{name} v13, v12 src0_sel:BYTE_2", inputs.view(np.uint32))
        rounded = torch.from_numpy(inputs).to(dtype)
        assert np.array_equal(out[:, :1].copy().view(np.uint8), rounded.view(torch.uint8).numpy())
        assert np.array_equal(out[:, 1].copy().view(np.float32), rounded.float().numpy()[:, 2])


def test_a_broadcast_of_matrix_blocks() -> None:
    """With cbsz 1 and abid 1 pairs of blocks take A of the second; with blgp 1 all take B of the first 32 lanes."""
    inputs = np.random.default_rng(2).standard_normal((64, 4)).astype(np.float32)
    moves = "".join(f"v_accvgpr_read_b32 v{12 + i}, a{20 + i}\n" for i in range(2))
    code = f"v_mfma_f32_16x16x1_4b_f32 a[16:31], v4, v5, 0 cbsz:1 abid:1 blgp:1\n s_nop 15\n s_nop 3\n{moves}"
    out = run_lanes(code, inputs.view(np.uint32))[:, :2].copy().view(np.float32)
    a, b = inputs[:, 0].reshape(4, 16), inputs[:, 1].reshape(4, 16)
    product = np.outer(a[1], b[1])  # block 1: registers 4 to 7; rows 4 (lane / 16) + register
    rows = 4 * (LANE // 16)
    assert np.array_equal(out, np.stack([product[rows, LANE % 16], product[rows + 1, LANE % 16]], axis=1))


def test_a_fused_multiply_add_is_rounded_once() -> None:
    """The product lies half way between two floats; what is added, below a float64's last bit, decides."""
    inputs = np.zeros((64, 4), np.float32)
    inputs[:, :2] = 1 + 2.0**-12
    inputs[:, 2] = np.where(LANE % 2, 2.0**-60, -(2.0**-60))
    inputs[32:, 1:3] *= -1
    out = run_lanes("v_fma_f32 v12, v4, v5, v6", inputs.view(np.uint32))[:, 0].copy().view(np.float32)
    below = np.float32(1 + 2.0**-11)
    wanted = np.where(LANE % 2, np.nextafter(below, np.float32(2)), below)
    assert out.tolist() == np.where(LANE < 32, wanted, -wanted).tolist()
    halves = np.zeros((64, 8), np.float16)
    halves[:, ::2][:, :3] = np.where(LANE % 2, 2.0**-24, -(2.0**-24))[:, None] * [0, 0, 1] + [1 + 2**-5, 1 + 2**-6, 0]
    out16 = run_lanes("v_fma_f16 v12, v4, v5, v6", halves.view(np.uint32))[:, 0].astype(np.uint16).view(np.float16)
    exact = (1 + 2**-5) * (1 + 2**-6) + np.where(LANE % 2, 2.0**-24, -(2.0**-24))
    assert out16.tolist() == exact.astype(np.float16).tolist()


def test_small_blocks_of_doubles() -> None:
    """A[i][k] of a block lies in lane i + 4 block + 16 k, B[k][j] likewise, D[i][j] in lane j + 4 block + 16 i."""
    a, b = np.random.default_rng(3).standard_normal((2, 64))
    inputs = np.stack([a, b], axis=1).view(np.uint32)
    out = run_lanes("v_mfma_f64_4x4x4_4b_f64 v[12:13], v[4:5], v[6:7], 0\n s_nop 8", inputs)
    found = out[:, :2].copy().view(np.float64)[:, 0].reshape(4, 4, 4)  # i, block, j
    wanted = np.einsum("kbi,kbj->ibj", a.reshape(4, 4, 4), b.reshape(4, 4, 4))
    np.testing.assert_allclose(found, wanted, rtol=1e-13)
