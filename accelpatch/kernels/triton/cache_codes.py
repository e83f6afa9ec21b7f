"""A KV cache in another format than the model's, in kernels: codes to floats, and the rows of new tokens to codes.

FORM: 0 for numbers of the model's dtype (or bfloat16 in a float32 model), 1 for int8, 2 for fp8; see
../layouts/kv_states.py. Codes are read as bytes, since not every arch's compiler knows e4m3fn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.layouts.kv_states import BF16, FLOAT, FP8, INT8, States, format_of, tensors_of
from accelpatch.kernels.triton.rotation import pair, rotated

_FORMS = {FLOAT: 0, BF16: 0, INT8: 1, FP8: 2}
_ROUND = tl.constexpr(12582912.0)  # 1.5 2^23: a number that it is added to is rounded to a whole one


def pointers(keys: States, values: States, unused: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """(FORM, (keys, values, their scales)) as kernels take them; `unused` in place of scales that there are not."""
    both = [(*tensors_of(one), unused)[:2] for one in (keys, values)]
    return _FORMS[format_of(keys)], (both[0][0], both[1][0], both[0][1], both[1][1])


@triton.jit
def decoded(codes, kind: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes as numbers of a float dtype, exactly."""
    if FORM == 2:  # as bits of float16, whose exponents are 8 higher
        bits = codes.to(tl.int32)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
        made = (half.to(tl.float32) * 256.0).to(kind)
    elif FORM == 1:
        made = codes.to(tl.float32).to(kind)
    else:
        made = codes.to(kind)
    return made


@triton.jit
def _to_bf16(x):  # type: ignore[no-untyped-def]
    """float32 to bfloat16, to the nearest, ties to even (the interpreter would cut off)."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x).to(tl.bfloat16)


@triton.jit
def encoded(values, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(codes, scales) of rows of floats; columns beyond a row's end are zero."""
    wide = values.to(tl.float32)
    most: tl.constexpr = 127.0 if FORM == 1 else 448.0
    nothing = tl.where(wide == wide, 0.0, wide)  # NaN, which the largest number leaves out
    scale = _to_bf16((tl.max(tl.abs(wide), axis=1) + tl.sum(nothing, axis=1)) / most)
    by = scale.to(tl.float32)
    fit = (by > 0.0) & (by < float("inf"))  # else zeros, or a row that is read as NaN
    x = tl.where(fit[:, None], wide / tl.where(fit, by, 1.0)[:, None], 0.0)
    x = tl.minimum(tl.maximum(x, -most), most)
    if FORM == 1:
        codes = ((x + _ROUND) - _ROUND).to(tl.int8)
    else:
        size, sign = tl.abs(x), x.to(tl.int32, bitcast=True) >> 24 & 0x80
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        below = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF  # whose last bit is worth that of a subnormal
        codes = (sign | tl.where(size < 0.015625, below, normal)).to(tl.int8)
    return codes, scale


@triton.jit
def put(  # type: ignore[no-untyped-def]
    states, scales, place, here, both, columns, value, SIZE: tl.constexpr, FORM: tl.constexpr
):
    """Write rows of floats into the slots `place` of a cache, where they are `here`; both: rows and columns that
    are."""
    if FORM == 0:
        tl.store(states + place[:, None] * SIZE + columns[None, :], value.to(states.dtype.element_ty), mask=both)
    else:
        codes, scale = encoded(tl.where(both, value, 0.0), FORM)
        tl.store(states + place[:, None] * SIZE + columns[None, :], codes, mask=both)
        tl.store(scales + place, scale, mask=here)


@triton.jit
def cache_new(  # type: ignore[no-untyped-def]
    new, cos, sin, k_norm, keys, values, k_scales, v_scales, here, slot, kv_heads, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    MAX_NEW_TOKENS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write k and v of the new tokens, where `here`, into the cache; new[MOST] points to their k."""
    columns, place = tl.arange(0, WIDE), slot + tl.arange(0, MAX_NEW_TOKENS)
    both = here[:, None] & (columns < SIZE)[None, :]
    value, other, others = pair(new, here, columns, SIZE, ROTARY_DIM)
    v = tl.load((new + kv_heads * SIZE)[:, None] + columns[None, :], mask=both, other=0.0)
    put(values, v_scales, place, here, both, columns, v, SIZE, FORM)
    k = rotated(value, other, others, columns, cos, sin, k_norm, eps, SIZE, ROTARY_DIM, NORM, PLUS_ONE)
    put(keys, k_scales, place, here, both, columns, k, SIZE, FORM)


@triton.jit
def scales_at(scales, at, here, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of slots, where they are `here`; of a cache without any, ones."""
    if FORM == 0:
        made = tl.full(at.shape, 1.0, tl.float32)
    else:
        made = tl.load(scales + at, mask=here, other=0.0).to(tl.float32)
    return made


@triton.jit
def weighted(weight, v, by, mean, kept, seen, FORM: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """mean * kept + (weight * by) @ v: of codes v with scales `by`, or of floats. seen: where weights are not zero."""
    if FORM == 0:
        made = mean * kept[:, None] + tl.dot(weight.to(kind), v, input_precision="ieee")
    elif kind == tl.float16:  # whose numbers end at 2^-24: the largest scale that a row sees is taken out
        most = tl.max(tl.where(seen, by[None, :], 0.0), axis=1)
        most = tl.where(most > 0.0, most, 1.0)
        scaled = (weight * (by[None, :] / most[:, None])).to(kind)
        made = mean * kept[:, None] + tl.dot(scaled, v, input_precision="ieee") * most[:, None]
    else:
        made = mean * kept[:, None] + tl.dot((weight * by[None, :]).to(kind), v, input_precision="ieee")
    return made
