"""Checks of gemv_w8a8 against the integers of its operations, bit for bit: on a GPU, or through the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.linear import gemm_w8a8
from tests.support.gemv_checks import kinds, run
from tests.support.hip_gemv import TIMED, W8A8, Library, Packed

FORMAT = TIMED[W8A8]
# odd ends; slots of a lane in registers and read again; K in tiles on AMD, and at 33000 on NVIDIA
SHAPES = ((33, 65), (7, 200), (1, 128), (100, 576), (24, 4096), (66, 6144), (34, 11008), (18, 14336), (10, 33000))
RUNS: tuple[tuple[int, dict[str, int]], ...] = (
    (8, {"blocks": 2}),
    (5, {"blocks": 3}),
    (4, {}),
    (2, {"blocks": 2}),
    (1, {"blocks": 3, "shallow": 1}),
    (1, {}),
)
EXACT = ("product", "bias", "residual", "odd_residual", "relu")  # the rest has norms or approximate exponentials
EVERY_SHAPE = ("product", "rms", "silu_gate")
STATIC = 0.03


def weight(n: int, k: int, static: bool) -> Packed:
    """A weight[n, k], and the static scale of its input."""
    q, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), (torch.rand(n, 1) + 0.5) / (64 * k**0.5)
    return Packed(FORMAT, n, k, q, scale, torch.tensor([STATIC]) if static else None)


def reference(p: Packed, x: Tensor, kind: Mapping[str, Any]) -> Tensor:
    """y of the operations, from x[M, K]; of a norm's output the nearest values of x's dtype are quantised."""
    assert p.scale is not None
    xq, xs = rows.reference(_normed(x, kind), p.offset)
    sums = gemm_w8a8.accumulators(xq, p.w).to(torch.int32)
    bias, residual = kind.get("bias"), kind.get("residual")
    act = kind.get("activation", "none")
    gate = act == "silu_gate"
    y = gemm_w8a8.finished(
        sums, 1.0, xs.view(-1), p.scale.view(-1), bias, 1.0, None, "none" if gate else act, residual,
        torch.float32 if gate else x.dtype,
    )  # fmt: skip
    if not gate:
        return y
    first, second = y.chunk(2, -1)
    return (functional.silu(first) * second).to(x.dtype)


def _normed(x: Tensor, kind: Mapping[str, Any]) -> Tensor:
    norm, gain, shift = kind.get("norm", "none"), kind.get("norm_weight"), kind.get("norm_bias")
    if norm == "none":
        return x
    wide = x.float()
    assert gain is not None
    if norm == "layer":
        return functional.layer_norm(wide, wide.shape[-1:], gain.float(), shift.float(), 1e-5).to(x.dtype)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * factor * (gain.float() + (norm == "rms_plus_one"))).to(x.dtype)


def wrong(y: Tensor, due: Tensor, exact: bool) -> str:
    """Why y is not what is due; empty where it is. Not exact: within 2 u of a bf16, as for one operation."""
    if not torch.equal(y.isnan(), due.isnan()):
        return "NaN elsewhere"
    y, due = y.nan_to_num(0.0), due.nan_to_num(0.0)
    if exact:
        return "" if torch.equal(y, due) else f"{int((y != due).sum())} of {y.numel()} differ"
    y, due = y.double(), due.double()
    unit = 2 * torch.finfo(torch.bfloat16).eps / 2
    bound = unit * due.abs().maximum(due.square().mean(-1, keepdim=True).sqrt())
    worst = ((y - due).abs() / bound.clamp(min=1e-30)).max()
    return "" if worst <= 1 else f"{float(worst):.2f} of the bound"


def check_w8a8(lib: Library, dtype: torch.dtype, static: bool, device: str) -> list[str]:
    """What is wrong, over shapes, epilogues, strides, tiny rows, an infinity; and other bits at another M."""
    bad = []
    for index, (n, k) in enumerate(SHAPES):
        packed = weight(n, k, static)
        for at, (name, kind) in enumerate(kinds(n, k, RUNS[0][0], dtype, "cpu").items()):
            if name not in EVERY_SHAPE and n != 100:
                continue
            cut = 3 if (at + index) % 2 else 8  # strided; after 3 no row is aligned but by chance
            wide = torch.randn(RUNS[0][0], k + cut, dtype=dtype)
            if name == "product":
                wide[5, cut + 4] = float("inf")
                wide[4, -1] = float("nan")
            if dtype == torch.bfloat16:
                wide[0] *= 2.0**-122
                wide[3] *= 2.0**-112
            x = wide[:, cut:]
            due = reference(packed, x, kind)
            for m, tuning in RUNS:
                part = {**kind, "residual": kind["residual"][:m]} if "residual" in kind else kind
                there = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in part.items()}
                y = run(lib, packed.to(device), wide.to(device)[:m, cut:], there, **tuning).cpu()
                if m == RUNS[0][0]:
                    whole = y
                if not torch.equal(y.nan_to_num(7), whole[:m].nan_to_num(7)):
                    bad.append(f"N={n} K={k} {name} M={m} {tuning}: other bits than at M={RUNS[0][0]}")
                if reason := wrong(y, due[:m], name in EXACT):
                    bad.append(f"N={n} K={k} {name} M={m} {tuning}: {reason}")
    return bad


def check_integers(lib: Library, dtype: torch.dtype, static: bool, device: str) -> list[str]:
    """Every value of a row beside every largest one, up to powers of two: which integers they become.

    The weight is the identity, so that y says which.
    """
    mantissas = 1 + torch.arange(128) / 128  # fp16 has more, of which these are some
    x = torch.cat([mantissas * 2.0**-power * (-1) ** power for power in range(9)]).repeat(128, 1)
    largest = mantissas[:, None]
    x = torch.where(x.abs() <= largest, x, largest).to(dtype)
    k = x.shape[1]
    eye = Packed(FORMAT, k, k, torch.eye(k, dtype=torch.int8), torch.ones(k, 1), torch.tensor([1.3 / 127]))
    packed = eye if static else replace(eye, offset=None)
    y = torch.full((len(x), k), float("nan"), dtype=dtype).to(device)
    lib.call(packed.to(device), x.to(device), y)
    reason = wrong(y.cpu(), reference(packed, x, {}), True)
    return [reason] if reason else []


def check_large_sums(lib: Library, device: str) -> list[str]:
    """Sums that no float32 holds: they have to be added as integers, wherever K was cut."""
    bad = []
    for k, m in ((11008, 8), (11008, 1), (4096, 3), (33000, 8)):
        packed = weight(50, k, False)
        packed.w = packed.w.abs() // 2 + 64
        packed.scale = torch.full((50, 1), 1 / 127 / k)
        x = (torch.rand(m, k) + 0.5).to(torch.bfloat16)
        residual = -reference(packed, x, {})  # what is left are the last bits of the sums
        kind = {"residual": residual}
        there = {"residual": residual.to(device)}
        y = run(lib, packed.to(device), x.to(device), there).cpu()
        if reason := wrong(y, reference(packed, x, kind), True):
            bad.append(f"K={k} M={m}: {reason}")
    return bad
