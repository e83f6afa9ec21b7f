"""Integer arithmetic, bits and moves of vector registers."""

from __future__ import annotations

import numpy as np

from accelpatch.jit.emulate.vector import vector
from accelpatch.jit.emulate.wave import Array

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def high_unsigned(a: Array, b: Array) -> Array:
    return (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32)


def high_signed(a: Array, b: Array) -> Array:
    return (a.astype(I64) * b.astype(I64) >> I64(32)).astype(I32)


def low24(a: Array) -> Array:
    return a & U32(0xFFFFFF)


def signed24(a: Array) -> Array:
    return a << I32(8) >> I32(8)


def extract_unsigned(a: Array, offset: Array, width: Array) -> Array:
    return (a >> (offset & U32(31))) & ((U32(1) << (width & U32(31))) - U32(1))


def extract_signed(a: Array, offset: Array, width: Array) -> Array:
    """Bits of a from offset on, sign-extended; none where the width is 0."""
    offset, width = (offset & 31).astype(U32), (width & 31).astype(U32)
    field = (a.astype(U32) >> offset) & ((U32(1) << width) - U32(1))
    top = U32(1) << (np.maximum(width, U32(1)) - U32(1))
    fits = offset + width < 32  # else the sign bit is that of the register, and a plain shift does it
    return np.where(width == 0, I32(0), np.where(fits, ((field ^ top) - top).view(I32), a >> offset.view(I32)))


def reversed_bits(a: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        a = (a >> U32(shift) & U32(mask)) | (a & U32(mask)) << U32(shift)
    return a >> U32(16) | a << U32(16)


def count_bits(a: Array) -> Array:
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8)).reshape(len(a), 32).sum(1).astype(U32)


def leading_zeros(a: Array) -> Array:
    """Zeros above the highest set bit; -1 where there is none."""
    return np.where(a == 0, U32(0xFFFFFFFF), U32(31) - np.log2(np.maximum(a, U32(1)).astype(np.float64)).astype(U32))


def trailing_zeros(a: Array) -> Array:
    return np.where(
        a == 0, U32(0xFFFFFFFF), np.log2(np.maximum(a & (~a + U32(1)), U32(1)).astype(np.float64)).astype(U32)
    )


def leading_signs(a: Array) -> Array:
    """Bits at the top that equal the sign; -1 where all do."""
    return leading_zeros(np.where(a < 0, ~a, a).view(U32))


def align_bits(a: Array, b: Array, shift: Array) -> Array:
    return ((a.astype(U64) << U64(32) | b) >> (shift & U32(31)).astype(U64)).astype(U32)


def permute_bytes(a: Array, b: Array, select: Array) -> Array:
    """v_perm_b32: bytes of {a, b} by the four selectors; 8 to 11 signs of b's and a's halves, 12 zero, above 0xff."""
    both = a.astype(U64) << U64(32) | b
    out = np.zeros(np.broadcast_shapes(both.shape, select.shape), U32)
    for at in range(4):
        chosen = select >> U32(8 * at) & U32(255)
        byte = (both >> (np.minimum(chosen, U32(7)).astype(U64) * U64(8)) & U64(255)).astype(U32)
        top = (np.clip(chosen, U32(8), U32(11)) - U32(8)).astype(U64) * U64(16) + U64(15)
        sign = (both >> top & U64(1)).astype(U32) * U32(255)
        byte = np.where(chosen < 8, byte, np.where(chosen < 12, sign, np.where(chosen == 12, U32(0), U32(255))))
        out |= byte << U32(8 * at)
    return out


def middle(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def sum_of_differences(a: Array, b: Array, c: Array) -> Array:
    """v_sad_u8."""
    out = c.copy()
    for shift in range(0, 32, 8):
        x, y = a >> U32(shift) & U32(255), b >> U32(shift) & U32(255)
        out = out + np.maximum(x, y) - np.minimum(x, y)
    return out


vector("u32: u32", {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": reversed_bits,
    "v_ffbh_u32": leading_zeros,
    "v_ffbl_b32": trailing_zeros,
    "v_sat_pk_u8_i16": lambda a: (np.clip((a & 0xFFFF).astype(np.uint16).view(np.int16), 0, 255).astype(U32)
                                  | np.clip((a >> 16).astype(np.uint16).view(np.int16), 0, 255).astype(U32) << U32(8)),
})  # fmt: skip
vector("i32: i32", {"v_ffbh_i32": lambda a: leading_signs(a).view(I32)})
vector("u32: u32 u32", {
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": high_unsigned,
    "v_mul_u32_u24": lambda a, b: low24(a) * low24(b),
    "v_mul_hi_u32_u24": lambda a, b: high_unsigned(low24(a), low24(b)),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << (a & U32(31)),
    "v_lshrrev_b32": lambda a, b: b >> (a & U32(31)),
    "v_bcnt_u32_b32": lambda a, b: count_bits(a) + b,
    "v_bfm_b32": lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
})  # fmt: skip
vector("i32: i32 i32", {
    "v_mul_hi_i32": high_signed,
    "v_mul_i32_i24": lambda a, b: signed24(a) * signed24(b),
    "v_mul_hi_i32_i24": lambda a, b: high_signed(signed24(a), signed24(b)),
    "v_min_i32": np.minimum,
    "v_max_i32": np.maximum,
    "v_ashrrev_i32": lambda a, b: b >> (a & I32(31)),
})  # fmt: skip
vector("u32: u32 u32 u32", {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & U32(31))) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & U32(31)),
    "v_lshl_or_b32": lambda a, b, c: a << (b & U32(31)) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": extract_unsigned,
    "v_alignbit_b32": align_bits,
    "v_alignbyte_b32": lambda a, b, c: align_bits(a, b, (c & U32(3)) * U32(8)),
    "v_perm_b32": permute_bytes,
    "v_mad_u32_u24": lambda a, b, c: low24(a) * low24(b) + c,
    "v_mad_u32_u16": lambda a, b, c: (a & U32(0xFFFF)) * (b & U32(0xFFFF)) + c,
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_med3_u32": middle,
    "v_sad_u8": sum_of_differences,
    "v_sad_u32": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
})  # fmt: skip
vector("i32: i32 i32 i32", {
    "v_bfe_i32": extract_signed,
    "v_mad_i32_i24": lambda a, b, c: signed24(a) * signed24(b) + c,
    "v_mad_i32_i16": lambda a, b, c: (a << I32(16) >> I32(16)) * (b << I32(16) >> I32(16)) + c,
    "v_min3_i32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_i32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_med3_i32": middle,
})  # fmt: skip
vector("f32: f32 f32 mask", {"v_cndmask_b32": lambda a, b, mask: np.where(mask, b, a)})
vector("u64: u64", {"v_mov_b64": lambda a: a}, "gfx942 gfx950")
vector("u64: u32 u64", {
    "v_lshlrev_b64": lambda a, b: b << (a & U32(63)).astype(U64),
    "v_lshrrev_b64": lambda a, b: b >> (a & U32(63)).astype(U64),
})  # fmt: skip
vector("i64: u32 i64", {"v_ashrrev_i64": lambda a, b: b >> (a & U32(63)).astype(I64)})
vector("u64: u64 u32 u64", {"v_lshl_add_u64": lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c}, "gfx942 gfx950")
