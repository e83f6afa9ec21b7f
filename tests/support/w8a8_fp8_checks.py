"""Checks of gemv_w8a8_fp8 against its formulas in float64: on a GPU, or through the emulator.

The 8-bit floats of a row are those of the formula exactly, and so are their products; what a kernel may differ by are
the roundings of its float32 sums, of the epilogue and of y. Of a norm's output, which is rounded to x's dtype before
it is quantised, both neighbours are taken where float32 may round to either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.gemv_checks import kinds, run
from tests.support.gemv_formats import FP8_FORMS
from tests.support.hip_gemv import TIMED, W8A8_FP8, Library, Packed
from tests.support.w8a8_checks import EVERY_SHAPE, RUNS, SHAPES

STATIC = 0.004
LEAST = 2.0**-119  # a row whose largest magnitude is below has no scale
NORM_ERROR = 2.0**-19  # of a norm's factor and mean in float32, relative to it and to the largest value
APPROXIMATE = 2.0**-18  # of an activation
STEEPEST = 1.2  # slope of an activation


def dtype_of(form: str) -> torch.dtype:
    """torch.float8_e4m3fn or torch.float8_e4m3fnuz."""
    found: torch.dtype = getattr(torch, f"float8_{form}")
    return found


def held(form: str, q: Tensor, scale: Tensor, static: float | None) -> Packed:
    """A weight q[n, k] of 8-bit floats with scale[n, 1], and the static scale of its input."""
    given = None if static is None else torch.tensor([static])
    return Packed(replace(TIMED[W8A8_FP8], argument=FP8_FORMS.index(form)), *q.shape, q, scale, given)


def weight(form: str, n: int, k: int, static: bool) -> Packed:
    """Of every size of number, up to the largest."""
    q = (torch.randn(n, k) * 60).clamp(-240, 240).to(dtype_of(form))
    return held(form, q, (torch.rand(n, 1) + 0.5) / (64 * k**0.5), STATIC if static else None)


def scale_and_factor(x: Tensor, form: str, static: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each row of x, float32: its scale, NaN where a value is not finite, and what its values are multiplied by."""
    most = x.float().abs().amax(-1)
    largest = torch.full_like(most, torch.finfo(dtype_of(form)).max)  # a number over a tensor would be two roundings
    large = most >= LEAST
    scale, factor = torch.where(large, most / largest, 0.0), torch.where(large, largest / most, 0.0)
    if static is not None:
        scale, factor = static.to(x.device).expand_as(most), (1 / static.to(x.device)).expand_as(most)
    return torch.where(most.isfinite(), scale, math.nan), factor


def quantized(x: Tensor, form: str, factor: Tensor) -> Tensor:
    """The 8-bit floats of x[M, K] times the factor of its row; zeros for what is not a number then."""
    largest = torch.finfo(dtype_of(form)).max
    return (x.float() * factor[:, None]).nan_to_num(0.0, 0.0, 0.0).clamp(-largest, largest).to(dtype_of(form))


class Due(NamedTuple):
    """y in float64 and by how much an output may differ from it, NaN where y is to be NaN; infinite where float32 may
    round a row's largest magnitude to either of two values, which changes the whole row."""

    y: Tensor
    bound: Tensor


def reference(p: Packed, x: Tensor, kind: Mapping[str, Any]) -> Due:
    """What is due for x[M, K] with the arguments `kind` of a launch."""
    assert p.scale is not None
    form, dtype = p.format.variant, x.dtype
    corners = torch.stack(list(_normed(x, kind)))
    low, high = corners.amin(0), corners.amax(0)
    (scale, factor), (other, _) = (scale_and_factor(one, form, p.offset) for one in (low, high))
    first, second = (quantized(one, form, factor).double() for one in (low, high))
    w = p.w.to(x.device).double()
    steps = (scale.double()[:, None] * p.scale.to(x.device).double().view(-1)).contiguous()
    sums, sizes = (first + second) / 2 @ w.T, first.abs().maximum(second.abs()) @ w.abs().T
    rounded = (p.k / 128 + 16) * 2.0**-23 * sizes * steps + 2.0**-149 * sums.abs()
    bound = rounded + (second - first).abs() / 2 @ w.abs().T * steps
    y = sums * steps
    if "bias" in kind:
        y = y + kind["bias"].to(x.device).double()
        bound = bound + 2.0**-22 * y.abs()
    y, bound = _activated(kind.get("activation", "none"), y, bound)
    if "residual" in kind:
        y = y + kind["residual"].to(x.device).double()
        bound = bound + 2.0**-22 * y.abs()
    bound = bound + torch.finfo(dtype).eps / 2 * (y.abs() + bound) + torch.finfo(dtype).smallest_normal * 2.0**-8
    either = (scale != other) & scale.isfinite()
    return Due(y, torch.where(either[:, None], math.inf, bound))


def _activated(act: str, y: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    if act == "none":
        return y, bound
    if act == "silu_gate":
        (a, b), (of_a, of_b) = y.chunk(2, -1), bound.chunk(2, -1)
        gate = functional.silu(a)
        out = gate * b
        return out, STEEPEST * of_a * (b.abs() + of_b) + gate.abs() * of_b + APPROXIMATE * out.abs()
    tanh = {"approximate": "tanh"} if act == "gelu_tanh" else {}
    out = getattr(functional, act.removesuffix("_tanh"))(y, **tanh)
    # by a difference of numbers near 1
    return out, STEEPEST * bound + APPROXIMATE * (out.abs() + (y.abs() if act.startswith("gelu") else 0.0))


def _normed(x: Tensor, kind: Mapping[str, Any]) -> Iterator[Tensor]:
    """x behind the norm, in its dtype, with the norm's factor and mean at either end of where float32 may have them."""
    norm = kind.get("norm", "none")
    if norm == "none":
        yield x
        return
    gain, wide = kind["norm_weight"].to(x.device).double(), x.double()
    mean = wide.mean(-1, keepdim=True) if norm == "layer" else torch.zeros_like(wide[:, :1])
    factor = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + 1e-5)
    gain = gain + (norm == "rms_plus_one")
    shift = kind["norm_bias"].to(x.device).double() if norm == "layer" else 0.0
    for by in (-NORM_ERROR, NORM_ERROR):
        for moved in (-NORM_ERROR, NORM_ERROR) if norm == "layer" else (0.0,):
            centred = wide - mean - moved * wide.abs().amax(-1, keepdim=True)
            yield (centred * (factor * (1 + by)) * gain + shift).float().to(x.dtype)


def wrong(y: Tensor, due: Due) -> str:
    """Why y is not what is due; empty where it is."""
    if not torch.equal(y.isnan(), due.y.isnan()):
        return "NaN elsewhere"
    off = ((y.double() - due.y).abs() / due.bound).nan_to_num(0.0)
    return "" if off.numel() == 0 or off.max() <= 1 else f"{float(off.max()):.2f} of the bound"


def check_w8a8_fp8(lib: Library, form: str, dtype: torch.dtype, static: bool, device: str) -> list[str]:
    """What is wrong, over shapes, epilogues, strides, tiny rows, an infinity; and other bits at another M."""
    bad, checked, skipped = [], 0, 0
    for index, (n, k) in enumerate(SHAPES):
        packed = weight(form, n, k, static)
        for at, (name, kind) in enumerate(kinds(n, k, RUNS[0][0], dtype, "cpu").items()):
            if name not in EVERY_SHAPE and n != 100:
                continue
            cut = 3 if (at + index) % 2 else 8  # strided; after 3 no row is aligned but by chance
            wide = torch.randn(RUNS[0][0], k + cut, dtype=dtype)
            if name == "product":
                wide[5, cut + 4] = float("inf")
                wide[4, -1] = float("nan")
                wide[6] = 0
            if dtype == torch.bfloat16:
                wide[0] *= 2.0**-122
                wide[3] *= 2.0**-112
            due = reference(packed, wide[:, cut:], kind)
            checked, skipped = checked + len(wide), skipped + int(due.bound.isinf().any(-1).sum())
            for m, tuning in RUNS:
                part = {**kind, "residual": kind["residual"][:m]} if "residual" in kind else kind
                there = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in part.items()}
                y = run(lib, packed.to(device), wide.to(device)[:m, cut:], there, **tuning).cpu()
                if m == RUNS[0][0]:
                    whole = y
                if not torch.equal(y.nan_to_num(7), whole[:m].nan_to_num(7)):
                    bad.append(f"N={n} K={k} {name} M={m} {tuning}: other bits than at M={RUNS[0][0]}")
                if reason := wrong(y, Due(due.y[:m], due.bound[:m])):
                    bad.append(f"N={n} K={k} {name} M={m} {tuning}: {reason}")
    return bad if skipped < checked / 8 else [*bad, f"{skipped} of {checked} rows not checked"]


def _codes(form: str) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype_of(form))


def check_every_code(lib: Library, form: str, device: str) -> list[str]:
    """What each of the 256 codes is worth as a weight, among zeros, NaN too; as bf16 and as fp16."""
    codes = _codes(form)
    q = torch.zeros(256, 64, dtype=torch.uint8).view(dtype_of(form))
    bad = []
    for column, dtype in ((0, torch.float16), (37, torch.bfloat16)):
        q.view(torch.uint8).zero_()[:, column] = codes.view(torch.uint8)
        x = torch.zeros(1, 64, dtype=dtype)
        x[0, column] = 1
        y = run(lib, held(form, q, torch.ones(256, 1), 1.0).to(device), x.to(device), {}).cpu()
        if not torch.equal(y.nan_to_num(9), codes.to(dtype)[None].nan_to_num(9)):
            bad.append(f"{dtype} of a code differs")
    return bad


def check_every_float(lib: Library, form: str, device: str) -> list[str]:
    """The 8-bit float that each finite fp16 becomes, with a static scale of 1: ties, subnormals, saturation."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every[every.isfinite()].view(-1, 64)
    eye = held(form, torch.eye(64).to(dtype_of(form)), torch.ones(64, 1), 1.0)
    y = run(lib, eye.to(device), x.to(device), {}).cpu()
    return [] if torch.equal(y, quantized(x, form, torch.ones(len(x))).to(torch.float16)) else ["a float differs"]


def check_scaled(lib: Library, form: str, dtype: torch.dtype, device: str) -> list[str]:
    """Every value of a row beside every largest one, up to powers of two: which 8-bit floats they become.

    The weight is the identity, so that y says which.
    """
    mantissas = 1 + torch.arange(128) / 128  # fp16 has more, of which these are some
    x = torch.cat([mantissas * 2.0**-power * (-1) ** power for power in range(9)]).repeat(128, 1)
    x = torch.where(x.abs() <= mantissas[:, None], x, mantissas[:, None]).to(dtype)
    k = x.shape[1]
    eye = held(form, torch.eye(k).to(dtype_of(form)), torch.ones(k, 1), None)
    y = run(lib, eye.to(device), x.to(device), {}).cpu()
    scale, factor = scale_and_factor(x, form, None)
    due = quantized(x, form, factor).float() * scale[:, None]
    return [] if torch.equal(y, due.to(dtype)) else [f"{int((y != due.to(dtype)).sum())} of {y.numel()} differ"]


def check_large_sums(lib: Library, form: str, device: str) -> list[str]:
    """Sums of one sign, and a residual that leaves their last bits: they are float32 sums wherever K was cut."""
    bad = []
    for k, m in ((11008, 8), (11008, 1), (4096, 3), (33000, 8)):
        packed = weight(form, 50, k, False)
        packed.w = packed.w.float().abs().to(dtype_of(form))
        x = (torch.rand(m, k) + 0.5).to(torch.bfloat16)
        kind = {"residual": -reference(packed, x, {}).y.to(torch.bfloat16)}
        y = run(lib, packed.to(device), x.to(device), {"residual": kind["residual"].to(device)}).cpu()
        if reason := wrong(y, reference(packed, x, kind)):
            bad.append(f"K={k} M={m}: {reason}")
    return bad
