"""Recipe fp8 beside exact, int8 and smoothquant: prompts, decoding, memory; and each implementation of its products.

    python scripts/bench.py fp8 [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--only products]
        [--cases 1x2048+1 1x128+64 32x128+64] [--recipes exact int8 smoothquant] [--repeats 5]

First every implementation is held to the float rule, on sizes of a 7B layer, with outliers in the rows; a failure ends
the run. Then products of one layer's shapes are timed, for 32 rows and as many as the first case's prompt:
torch._scaled_mm with float32 sums and with fast ones (whose error is printed in units of the rule's bound), the Triton
kernel with several tiles and sums, int8 and bf16. Then the model, which has the named shape and random weights, patched
as users patch it; fp8 once for each order of implementations. Every engine runs once in each of `--repeats` turns. On a
CPU there are no products to time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accelpatch.bench.generate import generate
from accelpatch.bench.timing import measure_replays
from accelpatch.device import probe
from accelpatch.kernels import choice, dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.ops.activation.gated_activation import gated_activation
from accelpatch.kernels.ops.activation.quantize_rows import quantize_rows
from accelpatch.kernels.ops.linear.gemm_w8a8 import gemm_w8a8
from scripts.benchmarks.engines import compare, patched, random_model
from scripts.benchmarks.harness import TINY, Case, Option, Table, cases, common
from scripts.benchmarks.kernels import LAYER, check

#: order -> implementations of gemm_fp8 and gated_fp8, as in choice.TABLE
ORDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "as in the table": {},
    "Triton": {"gemm_fp8": ("triton", "scaled_mm", "torch"), "gated_fp8": ("triton", "operations")},
}
CASES = [Case(1, 2048, 1), Case(1, 128, 64), Case(32, 128, 64)]
OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["exact", "int8", "smoothquant"], repeats=5),
    cases(CASES), Option("only", None, "A part alone; the checks come first in any.", ["products", "models"]), TINY,
)  # fmt: skip
WARM_UP = 3  # turns
TILES = ((128, 128, 8, 4), (128, 256, 8, 4), (128, 256, 8, 3), (256, 128, 8, 4), (128, 256, 16, 4))  # rows, columns
GATED_TILES = ((128, 64, 8, 4), (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 16, 4))
SUMS = (128, -1)  # products that Hopper's unit adds up itself; -1: all
Timed = Iterator[tuple[str, Callable[[], Tensor], tuple[Any, ...] | None]]


def operands(device: torch.device, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """Arguments of gemm_fp8 in the form of the device; x has channels and values far above the others."""
    form = FP8[probe(device).fp8 == fp8_name(FP8[1])]
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, w = (torch.randn(size, k, generator=generator, device=device) for size in (m, n))
    x[:, : k // 512] *= 30
    x[:, 3] += 50
    (a, row), (b, column) = quantize_rows(x, None, form), quantize_rows(w / k**0.5, None, form)
    return a, b, row.flatten(), column.flatten(), None, dtype


def share(args: tuple[Any, ...], y: Tensor, op: str = "gemm_fp8") -> float:
    """The largest error of an output in units of what the float rule allows."""
    found = parity.check(op, args, (y,))[0]
    return found.error / found.bound if found.bound else float("inf")


def calls_to_check(op: str, device: torch.device, rows: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Of either operation, on sizes of a 7B layer."""
    for m, (n, k) in itertools.product((1, 7, 16, 33, 64, 65, rows), ((4096, 4096), (520, 11008))):
        *held, dtype = operands(device, m, n, k)
        yield f"{m} x {k} x {n}", (*held, "silu", dtype) if op == "gated_fp8" else (*held, dtype)


@contextmanager
def tiled(tile: tuple[int, int, int, int], sums: int, gated: bool) -> Iterator[None]:
    """The Triton kernels of 8-bit floats by other tiles and sums."""
    from accelpatch.kernels.triton import gemm_w8a8 as kernels

    rows, columns, warps, stages = tile
    tiles = ((0, kernels.Block(rows, columns, 128, warps, stages)),)
    given = {"FP8_GATED" if gated else "FP8_TILES": tiles, "UNIT_SUMS": sums}
    with mock.patch.multiple(kernels, **given):
        yield


def scaled(args: tuple[Any, ...], fast: bool) -> Tensor:
    """torch._scaled_mm with a scale a row."""
    a, b, row, column, _, dtype = args
    scales = {"scale_a": row[:, None], "scale_b": column[None]}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=dtype, use_fast_accum=fast)


def calls(device: torch.device, m: int, n: int, k: int) -> Timed:
    """What is timed of one shape: its name, the call, and the arguments by which its error is judged."""
    from accelpatch.kernels.triton.gemm_w8a8 import gemm_fp8

    args = operands(device, m, n, k)
    yield "_scaled_mm", lambda: scaled(args, False), args
    yield "_scaled_mm, fast sums", lambda: scaled(args, True), args
    for tile in TILES if m > 64 else ():
        for sums in SUMS:
            with tiled(tile, sums, False):
                yield f"Triton {tile}, {sums}", lambda: gemm_fp8(*args), args
    if m <= 64:
        yield "Triton, a stream", lambda: gemm_fp8(*args), args
    a, b = (torch.randint(-127, 128, (size, k), dtype=torch.int8, device=device) for size in (m, n))
    x, w = (torch.randn(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
    beside = (1.0, *args[2:4], None, 1.0, None, "none", None, torch.bfloat16)
    yield "int8, ours", lambda: gemm_w8a8(a, b, *beside), None
    yield "bf16", lambda: x @ w.t(), None


def gated_calls(device: torch.device, m: int, n: int, k: int) -> Timed:
    """As `calls`, of a product with its SiLU gate."""
    from accelpatch.kernels.triton.gemm_w8a8 import gated

    *held, dtype = operands(device, m, n, k)
    args = (*held, "silu", dtype)
    for fast in (False, True):
        name = f"_scaled_mm{', fast sums' * fast}, gate behind"
        yield name, lambda fast=fast: gated_activation(*scaled((*held, dtype), fast).chunk(2, -1), "silu"), args
    for tile in GATED_TILES:
        for sums in SUMS:
            with tiled(tile, sums, True):
                yield f"Triton {tile}, {sums}", lambda: gated(*args), args
    a, b = (torch.randint(-127, 128, (size, k), dtype=torch.int8, device=device) for size in (m, n))
    yield "int8, ours", lambda: gated(a, b, *held[2:4], None, "silu", dtype), None


def products(device: torch.device, rows: int) -> list[dict[str, Any]]:
    """Microseconds of the products of a 7B layer, and their errors in units of the float rule's bound."""
    from triton.errors import TritonError

    printed = Table("products of one layer; errors as shares of the float rule's bound")
    for m in (rows, 32):
        for which, n, k in LAYER:
            gate = which == "gate_up" and m > 64
            for name, call, args in (gated_calls if gate else calls)(device, m, n, k):
                try:
                    error = None if args is None else share(args, call(), "gated_fp8" if gate else "gemm_fp8")
                    seconds = measure_replays(call).median
                except (RuntimeError, TritonError) as problem:  # a tile that this GPU cannot hold hides no other
                    print(f"{m} x {k} x {n} {name}: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
                    continue
                printed.add({"M x K x N": f"{m} x {k} x {n}", "by": name, "taken, us": 1e6 * seconds,
                             "TFLOP/s": 2e-12 * m * n * k / seconds, "error, share": error})  # fmt: skip
    return printed.rows


def under(order: dict[str, tuple[str, ...]]) -> Callable[[Any, Tensor, int], Tensor]:
    """generate() under an order of implementations, with choices of its own."""
    rows = choice.TABLE | {op: (choice.Row(names),) for op, names in order.items()}  # type: ignore[operator]
    selected: dict[Any, Any] = {}

    def call(model: Any, ids: Tensor, new: int) -> Tensor:
        before = choice.TABLE, dispatch._selected
        choice.TABLE, dispatch._selected = rows, selected  # type: ignore[misc]
        try:
            return generate(model, ids, new)
        finally:
            choice.TABLE, dispatch._selected = before  # type: ignore[misc]

    return call


def models(asked: argparse.Namespace) -> dict[str, Any]:
    """Prompts and decoding of every engine, beside the first one."""
    base = random_model(asked, endless=False)
    engines = [patched(base, recipe) for recipe in asked.recipes]
    engines += [patched(base, "fp8", f"fp8, {name}", how=under(order)) for name, order in ORDERS.items()]
    return dict(compare(engines, asked.cases, asked.repeats, WARM_UP, asked.recipes[:1]))


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, then the parts that were asked for."""
    device, rows, found = torch.device(asked.device), asked.cases[0].prompt, dict[str, Any]()
    for op in ("gemm_fp8", "gated_fp8"):
        check(op, calls_to_check(op, device, rows), device)
    if device.type == "cuda" and asked.only != "models":
        found["products"] = products(device, rows)
    return found if asked.only == "products" else found | models(asked)
