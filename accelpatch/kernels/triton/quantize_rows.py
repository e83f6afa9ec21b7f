"""Rows of activations in 8 bits, one row per program; see ../ops/activation/quantize_rows.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.triton.dependent_launch import overlap
from accelpatch.kernels.triton.gated_activation import CODES, _activated, gelu_of_16_bits
from accelpatch.kernels.triton.launch import dependent, on, rounds_to_e4m3, warps

_LEAST = tl.constexpr(2.0**-119)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 of up to 2^22 plus this, less this, is rounded to even


@triton.jit
def nearest(values):  # type: ignore[no-untyped-def]
    """float32 values to the nearest whole numbers from -128 to 127, ties to even, still float32."""
    values = tl.minimum(tl.maximum(values, -128.0), 127.0)
    return (values + _ROUND) - _ROUND


@triton.jit
def rounded(values):  # type: ignore[no-untyped-def]
    """float32 values to the nearest integers from -127 to 127, ties to even, as int8."""
    values = tl.minimum(tl.maximum(values, -127.0), 127.0)
    return ((values + _ROUND) - _ROUND).to(tl.int8)


@triton.jit
def nearest_e4m3(values, LEAST: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values at the nearest e4m3 numbers, ties to even. LEAST: the smallest; SIGNED: whether there is a -0.

    What is left for the conversion is exact, so that no compiler and no unit rounds in a way of its own.
    """
    bits = values.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    stepped = (values + _ROUND * LEAST) - _ROUND * LEAST  # below 8 LEAST numbers are LEAST apart
    near = tl.where(tl.abs(values) < 8 * LEAST, stepped, kept.to(tl.float32, bitcast=True))
    return tl.where(near == 0, values * 0.0 if SIGNED else 0.0, near)


@triton.jit
def store_row(  # type: ignore[no-untyped-def]
    values, given, q, scales, row, columns, width, STATIC: tl.constexpr, NATIVE: tl.constexpr
):
    """Write a row of float32 values, zeros past its end, in the form of q, and its scale. NATIVE: the device rounds to
    e4m3 itself, ties to even and saturated."""
    form: tl.constexpr = q.dtype.element_ty
    largest: tl.constexpr = 127.0 if form == tl.int8 else 448.0 if form == tl.float8e4nv else 240.0
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of magnitudes; those of NaN are above infinity's
    absmax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    finite = absmax < float("inf")
    if STATIC:
        scale = tl.load(given).to(tl.float32)
        inverse = tl.div_rn(1.0, scale)
    else:
        normal = absmax >= _LEAST
        scale = tl.where(normal, tl.div_rn(absmax, largest), 0.0)
        inverse = tl.where(normal, tl.div_rn(largest + tl.zeros_like(absmax), tl.where(normal, absmax, 1.0)), 0.0)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))
    scaled = tl.where(finite, values, 0.0) * tl.where(finite, inverse, 0.0)
    if form == tl.int8:
        # without a given scale none is above 127 once it is rounded
        codes = rounded(scaled) if STATIC else ((scaled + _ROUND) - _ROUND).to(tl.int8)
    elif NATIVE:
        codes = tl.where(inverse > 0, scaled, 0.0).to(form)
    else:
        scaled = tl.where(inverse > 0, tl.minimum(tl.maximum(scaled, -largest), largest), 0.0)
        least: tl.constexpr = 0.001953125 if form == tl.float8e4nv else 0.0009765625
        codes = nearest_e4m3(scaled, least, form == tl.float8e4nv).to(form)
    tl.store(q + row * width + columns, codes, mask=columns < width)


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    x, given, q, scales, x_stride, width,
    CODE: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """CODE: of the activation; -1 for none. GATED: a row of x is that of a gate, then that of up."""
    overlap(DEPENDENT)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = x + row * x_stride + columns, columns < width
    values = tl.load(at, mask=inside, other=0.0)
    if CODE >= 0:
        if CODE == 1 and values.dtype.primitive_bitwidth == 16:
            activated = gelu_of_16_bits(values.to(tl.float32)).to(values.dtype)
        else:
            activated = _activated(values.to(tl.float32), CODE).to(values.dtype)
        if GATED:
            up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
            activated = (activated.to(tl.float32) * up).to(values.dtype)
        values = activated
    store_row(values.to(tl.float32), given, q, scales, row, columns, width, STATIC, NATIVE)


def gated_rows(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """As the operation."""
    return _rows(both, scale, form, CODES[activation], True)


def activated_rows(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """As the operation."""
    return _rows(x, scale, form, CODES[activation], False)


def quantize_rows(x: Tensor, scale: Tensor | None, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """As the operation."""
    return _rows(x, scale, form, -1, False)


def _rows(x: Tensor, scale: Tensor | None, form: torch.dtype, code: int, gated: bool) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    q = x.new_empty((*x.shape[:-1], width), dtype=form)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    block, (overlapped, options) = triton.next_power_of_2(width), dependent(x)
    if q.numel():
        with on(x):
            _row[(flat.shape[0],)](
                flat, scales if scale is None else scale, q, scales, flat.stride(0), width, code, gated,
                scale is not None, rounds_to_e4m3(x), overlapped, block, num_warps=warps(block), **options,
            )  # fmt: skip
    return q, scales
