"""Products of one 7B layer in int8 and in 8-bit floats on a GPU: ours, torch's, Triton's and bf16."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accelpatch.bench.timing import measure_replays
from accelpatch.device import probe
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.ops.activation.gated_activation import gated_activation
from accelpatch.kernels.ops.activation.quantize_rows import quantize_rows
from accelpatch.kernels.ops.linear.gemm_w8a8 import gemm_w8a8
from scripts.benchmarks.harness import Table
from scripts.benchmarks.kernels import LAYER, check

PEAK = {"sm_90": 1979e12}  # int8 operations a second, without sparsity, as NVIDIA's data sheet has it
PLAIN = ((128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (128, 128, 128, 8, 4))  # rows, columns, depth, warps, stages
SUMS = {"Triton": 128, "Triton, fast sums": -1}  # products that Hopper's unit adds up itself; -1: all
Calls = dict[str, Callable[[], Any]]


def codes(device: torch.device, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Random A[M, K] and B[N, K] in int8."""
    a, b = (torch.randint(-127, 128, (size, k), dtype=torch.int8, device=device) for size in (m, n))
    return a, b


def in_bf16(device: torch.device, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """The product of as many values in bf16."""
    x, w = (torch.randn(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
    return lambda: x @ w.t()


def int8(device: torch.device, rows: int) -> list[dict[str, Any]]:
    """Microseconds of a layer's products for so many rows."""
    printed, peak = Table("products of one layer, int8"), PEAK.get(probe(device).arch)
    for _, n, k in LAYER:
        a, b = codes(device, rows, n, k)
        rest = (1.0, torch.rand(rows, device=device), torch.rand(n, device=device), None, 1.0, None, "none", None)
        calls: Calls = {
            "ours": lambda a=a, b=b, rest=rest: gemm_w8a8(a, b, *rest, torch.bfloat16),
            "plain Triton": plain_triton(a, b), "_int_mm": lambda a=a, b=b: torch._int_mm(a, b.t()),
            "bf16": in_bf16(device, rows, n, k),
        }  # fmt: skip
        taken = {name: measure_replays(call).median for name, call in calls.items()}
        share = 2 * rows * n * k / taken["ours"] / peak if peak else None
        times = {f"{name}, us": 1e6 * one for name, one in taken.items()}
        printed.add({"M x K x N": f"{rows} x {k} x {n}"} | times | {"share of the peak": share})
    return printed.rows


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


def operands(device: torch.device, m: int, n: int, k: int, gate: bool) -> tuple[Any, ...]:
    """Arguments of gemm_fp8 or gated_fp8 in the device's form; x has channels and values far above the others."""
    form = FP8[probe(device).fp8 == fp8_name(FP8[1])]
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, w = (torch.randn(size, k, generator=generator, device=device) for size in (m, n))
    x[:, : k // 512] *= 30
    x[:, 3] += 50
    (a, row), (b, column) = quantize_rows(x, None, form), quantize_rows(w / k**0.5, None, form)
    return a, b, row.flatten(), column.flatten(), None, *(["silu"] if gate else []), torch.bfloat16


def check_fp8(device: torch.device, rows: int) -> None:
    """Hold both operations to the float rule, on sizes of a 7B layer; ends the program where one is over it."""
    for op in ("gemm_fp8", "gated_fp8"):
        shapes = itertools.product((1, 7, 16, 33, 64, 65, rows), ((4096, 4096), (520, 11008)))
        calls = ((f"{m} x {k} x {n}", operands(device, m, n, k, op == "gated_fp8")) for m, (n, k) in shapes)
        check(op, calls, device)


def fp8_calls(args: tuple[Any, ...], gate: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Implementations of a product, each with what it runs in."""
    from accelpatch.kernels.triton import gemm_w8a8 as triton

    a, b, row, column, *_, dtype = args

    def scaled(fast: bool) -> Tensor:
        scales = {"scale_a": row[:, None], "scale_b": column[None], "out_dtype": dtype, "use_fast_accum": fast}
        made = torch._scaled_mm(a, b.t(), **scales)
        return gated_activation(*made.chunk(2, -1), "silu") if gate else made

    yield "_scaled_mm", lambda: scaled(False)
    yield "_scaled_mm, fast sums", lambda: scaled(True)
    for name, sums in SUMS.items():
        with mock.patch.object(triton, "UNIT_SUMS", sums):
            yield name, lambda: (triton.gated if gate else triton.gemm_fp8)(*args)
    q, w = codes(a.device, a.shape[0], *b.shape)
    beside = (1.0, row, column, None, 1.0, None, "none", None, dtype)
    yield "int8, ours", lambda: triton.gated(q, w, *args[2:]) if gate else gemm_w8a8(q, w, *beside)


def fp8(device: torch.device, rows: int) -> list[dict[str, Any]]:
    """Microseconds of a layer's products, and their errors in units of the float rule's bound."""
    from triton.errors import TritonError

    printed = Table("products of one layer; errors as shares of the float rule's bound")
    for which, n, k in LAYER:
        gate = which == "gate_up"
        args = operands(device, rows, n, k, gate)
        for name, call in itertools.chain(fp8_calls(args, gate), [("bf16", in_bf16(device, rows, n, k))]):
            error = None
            try:
                if name.startswith(("_scaled_mm", "Triton")):
                    found = parity.check("gated_fp8" if gate else "gemm_fp8", args, (call(),))[0]
                    error = found.error / found.bound if found.bound else float("inf")
                seconds = measure_replays(call).median
            except (RuntimeError, TritonError) as problem:  # what this GPU lacks hides no other
                print(f"{rows} x {k} x {n} {name}: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
                continue
            printed.add({"M x K x N": f"{rows} x {k} x {n}", "by": name, "taken, us": 1e6 * seconds,
                         "error, share": error})  # fmt: skip
    return printed.rows
