"""Checks of the HIP products of 9 to 64 tokens with int4 weights, on a GPU and through the emulator on a CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import FORMATS, Library, pack

ROWS_FORMATS = tuple(name for name, form in FORMATS.items() if form.library == "gemv_int4")
SHAPES = [(33, 128), (33, 136), (33, 512), (300, 2048)]
TOKENS = (9, 31, 64, 16, 33)


def check_rows(lib: Library, name: str, dtype: torch.dtype, device: str = "cuda", **tuning: int) -> list[str]:
    """The product of many tokens with int4 weights: odd ends, a bias, values that no sum of codes holds; repeats."""
    bad = []
    every = list(itertools.product(SHAPES, TOKENS if device == "cuda" else TOKENS[:3]))
    for (n, k), m in every:
        p = pack(torch.randn(n, k) / k**0.5, name, dtype=dtype)
        packed = replace(p, format=replace(p.format, library="int4_gemm")).to(device)
        wide = torch.randn(m, k + 8, dtype=dtype)
        if m % 2:
            wide[1, 12], wide[2, 9], wide[3] = float("inf"), float("nan"), 0
            wide[4] *= 2.0**13 if dtype == torch.float16 else 2.0**123
            wide[5] *= 2.0**-22 if dtype == torch.float16 else 2.0**-110
        bias = torch.randn(n, dtype=dtype) if m % 2 else None
        kind = {} if bias is None else {"bias": bias.to(device)}
        results = []
        for _ in range(1 if device == "cpu" else 20):
            y = torch.full((m + 1, n + 3), float("nan"), dtype=dtype, device=device)
            lib.call(packed, wide.to(device)[:, 8:], y[:m, :n], **kind, **tuning)
            assert y[m:].isnan().all(), "wrote past its rows"
            assert y[:, n:].isnan().all(), "wrote past its columns"
            results.append(y[:m, :n].cpu())
        if reason := wrong(results[0], p.dense, wide[:, 8:], {} if bias is None else {"bias": bias}):
            bad.append(f"{name} {dtype} N={n} K={k} M={m} {tuning}: {reason}")
        if any(not torch.equal(y.nan_to_num(7), results[0].nan_to_num(7)) for y in results):
            bad.append(f"{name} {dtype} N={n} K={k} M={m} {tuning}: repeats differ")
    print(f"{name:18} {dtype!s:15} {len(every):4} products of many tokens, {len(bad)} bad", flush=True)
    return bad
