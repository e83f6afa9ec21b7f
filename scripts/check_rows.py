"""Correctness of the HIP products of 9 to 64 tokens with int4 weights on the GPU that is here, and that repeats agree.

python scripts/check_rows.py --libraries DIR           # the folder that `accelpatch build` names
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from check_kernels import moved, wrong
from hip_gemv import FORMATS, Library, pack

FORMS = tuple(name for name, form in FORMATS.items() if form.library == "gemv_int4" and form.group not in (32, 64))
SHAPES = [(33, 128), (33, 136), (33, 512), (300, 2048)]
TOKENS = (9, 31, 64, 16, 33)


def check_rows(lib: Library, name: str, dtype: torch.dtype, device: str = "cuda", **tuning: int) -> list[str]:
    """The product of many tokens with int4 weights: odd ends, a bias, values that no sum of codes holds; repeats."""
    bad = []
    every = list(itertools.product(SHAPES, TOKENS if device == "cuda" else TOKENS[:3]))
    for (n, k), m in every:
        p = pack(torch.randn(n, k) / k**0.5, name, dtype=dtype)
        packed = moved(replace(p, format=replace(p.format, library="int4_gemm")), device)
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
        if reason := wrong(results[0], p, wide[:, 8:], {} if bias is None else {"bias": bias}):
            bad.append(f"{name} {dtype} N={n} K={k} M={m} {tuning}: {reason}")
        if any(not torch.equal(y.nan_to_num(7), results[0].nan_to_num(7)) for y in results):
            bad.append(f"{name} {dtype} N={n} K={k} M={m} {tuning}: repeats differ")
    print(
        f"{name:18} {dtype!s:15} {len(every):4} products of many tokens, {len(bad)} bad",
        flush=True,
    )
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, required=True)
    lib = Library(parser.parse_args().libraries)
    torch.manual_seed(0)
    tunings = [{}, {"blocks": 1}, {"blocks": 2}, {"blocks": 4}, {"blocks": 8}, {"dependent": -1}]
    every = itertools.product(FORMS, (torch.bfloat16, torch.float16), tunings)
    bad = [line for name, dtype, tuning in every for line in check_rows(lib, name, dtype, **tuning)]
    print("\n".join(bad[:40]))
    print(f"{len(bad)} failures")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
