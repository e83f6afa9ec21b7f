"""Vector additions and subtractions with carries in lane masks, and multiplications with 64-bit sums."""

from __future__ import annotations

import numpy as np

from accelpatch.jit.emulate.vector import vector
from accelpatch.jit.emulate.wave import Array

U32, U64, I64 = np.uint32, np.uint64, np.int64


def add_carry(a: Array, b: Array, carry: Array | int = 0) -> tuple[Array, Array]:
    total = a.astype(U64) + b + np.asarray(carry).astype(U64)
    return total.astype(U32), total > U64(0xFFFFFFFF)


def subtract_borrow(a: Array, b: Array, borrow: Array | int = 0) -> tuple[Array, Array]:
    less = b.astype(U64) + np.asarray(borrow).astype(U64)
    return (a.astype(U64) - less).astype(U32), less > a


def multiply_add_unsigned(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(U64) * b.astype(U64)
    total = product + c
    return total, total < product


def multiply_add_signed(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(I64) * b.astype(I64)
    total = product + c
    return total, ((product ^ total) & (c ^ total)) < 0


vector("u32 mask: u32 u32", {
    "v_add_co_u32": add_carry,
    "v_sub_co_u32": subtract_borrow,
    "v_subrev_co_u32": lambda a, b: subtract_borrow(b, a),
})  # fmt: skip
vector("u32 mask: u32 u32 mask", {
    "v_addc_co_u32": add_carry,
    "v_subb_co_u32": subtract_borrow,
    "v_subbrev_co_u32": lambda a, b, borrow: subtract_borrow(b, a, borrow),
})  # fmt: skip
vector("u64 mask: u32 u32 u64", {"v_mad_u64_u32": multiply_add_unsigned})
vector("i64 mask: i32 i32 i64", {"v_mad_i64_i32": multiply_add_signed})
