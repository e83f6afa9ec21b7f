"""SmoothQuant's recipes beside the model that is not patched and the other recipes: prompts, decoding, memory.

    python scripts/bench.py smoothquant [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipes ...]
        [--cases 1x2048+1 1x128+64 32x128+64] [--repeats 5]

The model has the named shape and random weights; it is patched as users patch it, verified, calibrated on its own text,
and only the originals are freed. Every engine runs once in each of `--repeats` turns. On a GPU the products of one
layer's shapes are timed too, for as many rows as the first case's prompt: ours with its scales, torch._int_mm, bf16,
and a plain Triton product without an epilogue.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelpatch.bench.timing import measure_replays
from accelpatch.device import probe
from scripts.benchmarks.engines import STOCK, compare, patched, random_model, stock
from scripts.benchmarks.harness import TINY, Case, Table, cases, common
from scripts.benchmarks.kernels import LAYER

PEAK = {"sm_90": 1979e12}  # int8 operations a second, without sparsity, as NVIDIA's data sheet has it
CASES = [Case(1, 2048, 1), Case(1, 128, 64), Case(32, 128, 64)]
RECIPES = ["exact", "int8", "smoothquant", "smoothquant-static"]
OPTIONS = (*common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=RECIPES, repeats=5), cases(CASES), TINY)
WARM_UP = 2  # turns
PLAIN = ((128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (128, 128, 128, 8, 4))  # rows, columns, depth, warps, stages


def products(device: torch.device, rows: int) -> list[dict[str, Any]]:
    """Microseconds of the products of a 7B layer for so many rows."""
    printed, peak = Table("products of one layer, int8"), PEAK.get(probe(device).arch)
    for _, n, k in LAYER:
        times = {name: measure_replays(call).median for name, call in calls(device, rows, n, k).items()}
        row: dict[str, Any] = {"M x K x N": f"{rows} x {k} x {n}"} | {
            f"{name}, us": 1e6 * one for name, one in times.items()
        }
        printed.add(row | {"share of the peak": 2 * rows * n * k / times["ours"] / peak if peak else None})
    return printed.rows


def calls(device: torch.device, m: int, n: int, k: int) -> dict[str, Callable[[], object]]:
    """What is timed of one shape."""
    from accelpatch.kernels.ops.linear.gemm_w8a8 import gemm_w8a8

    a, b = (torch.randint(-127, 128, (size, k), dtype=torch.int8, device=device) for size in (m, n))
    x, w = (torch.randn(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
    scales = torch.rand(m, device=device), torch.rand(n, device=device)
    return {
        "ours": lambda: gemm_w8a8(a, b, 1.0, *scales, None, 1.0, None, "none", None, torch.bfloat16),
        "plain Triton": plain_triton(a, b),
        "_int_mm": lambda: torch._int_mm(a, b.t()),
        "bf16": lambda: x @ w.t(),
    }


def plain_triton(a: Tensor, b: Tensor) -> Callable[[], object]:
    """A product of tiles as Triton's tutorial has it, int32 out, with the best of a few sizes."""
    from accelpatch.kernels.triton import gemm_w8a8_kernels as kernels

    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    out = torch.empty(m, n, dtype=torch.int32, device=a.device)

    def of(tile: tuple[int, int, int, int, int]) -> Callable[[], object]:
        rows, columns, depth, warps, stages = tile
        grid = (-(-m // rows) * -(-n // columns), 1)
        return lambda: kernels.tiles[grid](
            a, b, *(out,) * 7, 1.0, 1.0, m, n, k, k, k, 0, 0, False, False, False, False, False, -1,
            False, k % depth == 0, rows, columns, depth, 8, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return min((of(tile) for tile in PLAIN), key=lambda call: measure_replays(call).median)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Engines in turn, then the products."""
    base = random_model(asked, endless=False)
    engines = [stock(base), *(patched(base, recipe) for recipe in asked.recipes)]
    found: dict[str, Any] = compare(engines, asked.cases, asked.repeats, WARM_UP, [STOCK])
    if torch.device(asked.device).type == "cuda":
        found["products"] = products(torch.device(asked.device), asked.cases[0].prompt)
    return found
