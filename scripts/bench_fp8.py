"""Recipe fp8 beside exact, int8 and smoothquant: prompts, decoding, memory; and each implementation of its products.

    python scripts/bench_fp8.py [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--prompt 2048]
        [--recipes exact int8 smoothquant] [--batches 1 32] [--repeats 5] [--only products] [--json FILE]

First every implementation is held to the float rule, on sizes of a 7B layer, with outliers in the rows; a failure ends
the run. Then products of one layer's shapes are timed: torch._scaled_mm with float32 sums and with fast ones (whose
error is printed in units of the rule's bound), the Triton kernel with several tiles and sums, int8 and bf16. Then the
model, which has the named shape and random weights, patched as users patch it; fp8 once for each order of
implementations. Every engine runs once in each of `--repeats` turns. On a CPU there are no products to time.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.timing import measure_replays, once
from accelpatch.device import probe
from accelpatch.kernels import choice, dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.ops.activation.gated_activation import gated_activation
from accelpatch.kernels.ops.activation.quantize_rows import quantize_rows
from accelpatch.kernels.ops.linear.gemm_w8a8 import gemm_w8a8
from accelpatch.models import load

#: order -> implementations of gemm_fp8 and gated_fp8, as in choice.TABLE
ORDERS = {
    "as in the table": {},
    "Triton": {"gemm_fp8": ("triton", "scaled_mm", "torch"), "gated_fp8": ("triton", "operations")},
}
LAYER = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))  # N, K of a 7B layer; the third has the gate
TILES = ((128, 128, 8, 4), (128, 256, 8, 4), (128, 256, 8, 3), (256, 128, 8, 4), (128, 256, 16, 4))  # rows, columns
GATED_TILES = ((128, 64, 8, 4), (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 16, 4))
SUMS = (128, -1)  # products that Hopper's unit adds up itself; -1: all
Call = Callable[[], Tensor]


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


def checked(device: torch.device, rows: int) -> list[str]:
    """What is over the float rule, of every implementation that can run here."""
    bad = []
    for m in (1, 7, 16, 33, 64, 65, rows):
        for n, k in ((4096, 4096), (520, 11008)):
            for op in ("gemm_fp8", "gated_fp8"):
                *held, dtype = operands(device, m, n, k)
                args = (*held, "silu", dtype) if op == "gated_fp8" else (*held, dtype)
                for name, one in dispatch.kernel(op).implementations.items():
                    spec = dispatch.kernel(op).spec(*args)
                    if one.why_not(spec, probe(device)) is None:
                        part = share(args, one.run(*args), op)
                        print(f"{op} by {name}, {m} x {k} x {n}: {part:.0%} of the float rule's bound", flush=True)
                        bad += [f"{op} by {name}, {m} x {k} x {n}"] * (not part <= 1)
    return bad


@contextmanager
def tiled(tile: tuple[int, int, int, int], sums: int, gated: bool) -> Iterator[None]:
    """The Triton kernels of 8-bit floats by other tiles and sums."""
    from accelpatch.kernels.triton import gemm_w8a8 as kernels

    name = "FP8_GATED" if gated else "FP8_TILES"
    before = getattr(kernels, name), kernels.UNIT_SUMS
    rows, columns, warps, stages = tile
    setattr(kernels, name, ((0, kernels.Block(rows, columns, 128, warps, stages)),))
    kernels.UNIT_SUMS = sums
    try:
        yield
    finally:
        setattr(kernels, name, before[0])
        kernels.UNIT_SUMS = before[1]


def scaled(args: tuple[Any, ...], fast: bool) -> Tensor:
    """torch._scaled_mm with a scale a row."""
    a, b, row, column, _, dtype = args
    return torch._scaled_mm(
        a, b.t(), scale_a=row[:, None], scale_b=column[None], out_dtype=dtype, use_fast_accum=fast
    )  # fmt: skip


def calls(device: torch.device, m: int, n: int, k: int) -> Iterator[tuple[str, Call, tuple[Any, ...] | None]]:
    """What is timed of one shape: its name, the call, and the arguments by which its error is judged."""
    from accelpatch.kernels.triton.gemm_w8a8 import gemm_fp8

    args = operands(device, m, n, k)
    yield "_scaled_mm", lambda: scaled(args, False), args
    yield "_scaled_mm, fast sums", lambda: scaled(args, True), args
    if m > 64:
        for tile in TILES:
            for sums in SUMS:
                with tiled(tile, sums, False):
                    yield f"Triton {tile}, {sums}", lambda: gemm_fp8(*args), args
    else:
        yield "Triton, a stream", lambda: gemm_fp8(*args), args
    a, b = (torch.randint(-127, 128, (size, k), dtype=torch.int8, device=device) for size in (m, n))
    x, w = (torch.randn(size, k, dtype=torch.bfloat16, device=device) for size in (m, n))
    beside = (1.0, *args[2:4], None, 1.0, None, "none", None, torch.bfloat16)
    yield "int8, ours", lambda: gemm_w8a8(a, b, *beside), None
    yield "bf16", lambda: x @ w.t(), None


def gated_calls(device: torch.device, m: int, n: int, k: int) -> Iterator[tuple[str, Call, tuple[Any, ...] | None]]:
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

    found = []
    for m in (rows, 32):
        for n, k in LAYER:
            made = gated_calls if n == 22016 and m > 64 else calls
            for name, call, args in made(device, m, n, k):
                try:
                    op = "gated_fp8" if made is gated_calls else "gemm_fp8"
                    error = None if args is None else share(args, call(), op)
                    seconds = measure_replays(call).median
                except (RuntimeError, TritonError) as problem:  # a tile that this GPU cannot hold hides no other
                    print(f"{m} x {k} x {n} {name}: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
                    continue
                judged = "" if error is None else f", error {error:.0%} of the bound"
                rate = 2e-12 * m * n * k / seconds
                print(f"{m} x {k} x {n} {name}: {1e6 * seconds:.1f} us, {rate:.0f} TFLOP/s{judged}", flush=True)
                found.append({"m": m, "n": n, "k": k, "by": name, "seconds": seconds, "error": error})
    return found


class Engine:
    """A patched model, and the order of implementations under which all of its calls run."""

    def __init__(self, model: Any, order: dict[str, tuple[str, ...]]):
        self.model = model
        self.table = choice.TABLE | {op: (choice.Row(names),) for op, names in order.items()}  # type: ignore[operator]
        self.selected: dict[Any, Any] = {}

    def __call__(self, ids: Tensor, new: int) -> Tensor:
        before = choice.TABLE, dispatch._selected
        choice.TABLE, dispatch._selected = self.table, self.selected  # type: ignore[misc]
        try:
            return generate(self.model, ids, new)
        finally:
            choice.TABLE, dispatch._selected = before  # type: ignore[misc]


def engines(asked: argparse.Namespace) -> dict[str, Engine]:
    """A copy of the model patched by each recipe, and by fp8 for each order."""
    base = load.random(asked.model, dtype=getattr(torch, asked.dtype), device=asked.device)
    made: dict[str, Engine] = {}
    wanted = [(recipe, recipe, {}) for recipe in asked.recipes]
    wanted += [(f"fp8, {name}", "fp8", order) for name, order in ORDERS.items()]
    for name, recipe, order in wanted:
        before = allocated(asked.device)
        model = copy.deepcopy(base)
        accelpatch.patch(model, recipe, keep_original="none")
        report = model.accelpatch.report()
        made[name] = Engine(model, order)
        print(f"{name}: {sum(report.seconds.values()):.1f} s, {len(report.verification.failures)} over their bound, "
              f"{report.verification.fused_layers} layers fused, {allocated(asked.device) - before:.2f} GB; "
              f"{'; '.join(report.notes)}", flush=True)  # fmt: skip
    return made


def allocated(device: str) -> float:
    """GB in use on the device; 0 on a CPU."""
    if torch.device(device).type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device) / 1e9


def timed(made: dict[str, Engine], shape: Shape, asked: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Engine -> median seconds of a generate() call for one token, and of the further tokens."""
    vocabulary = next(iter(made.values())).model.config.vocab_size
    device = torch.device(asked.device)
    ids = prompt_ids(vocabulary, shape).to(device)
    first: dict[str, list[float]] = {name: [] for name in made}
    more: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(asked.repeats + 3):
        for name, engine in made.items():
            one = once(lambda engine=engine: engine(ids, 1), device)
            all_of_it = once(lambda engine=engine: engine(ids, shape.new), device) if shape.new > 1 else one
            if turn > 2:
                first[name].append(one)
                more[name].append(all_of_it - one)
    return {name: (statistics.median(first[name]), statistics.median(more[name])) for name in made}


def models(asked: argparse.Namespace) -> dict[str, Any]:
    """Prompts and decoding of every engine, beside the first one."""
    made, found = engines(asked), dict[str, Any]()
    for shape in (Shape(1, asked.prompt, 1), *(Shape(batch, 128, asked.new) for batch in asked.batches)):
        times = timed(made, shape, asked)
        own, own_more = times[asked.recipes[0]]
        print(f"\nbatch {shape.batch}, prompt {shape.prompt}, {shape.new} new; beside {asked.recipes[0]}")
        for name, (first, more) in times.items():
            rate = (
                f", {shape.batch * (shape.new - 1) / max(more, 1e-9):.1f} tokens/s ({own_more / max(more, 1e-9):.2f})"
            )
            print(f"  {name}: first token {1e3 * first:.2f} ms ({own / first:.2f}){rate * (shape.new > 1)}", flush=True)
        found[f"{shape.batch}x{shape.prompt}+{shape.new}"] = times
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="Shape of the model, a name of the catalog.")
    parser.add_argument("--device", default="cuda", help="Where it runs.")
    parser.add_argument("--dtype", default="bfloat16", help="Its dtype.")
    parser.add_argument("--recipes", nargs="+", default=["exact", "int8", "smoothquant"], help="What fp8 is beside.")
    parser.add_argument("--prompt", type=int, default=2048, help="Tokens of the prompt whose time is taken.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="Sequences that are decoded at once.")
    parser.add_argument("--new", type=int, default=64, help="New tokens of each.")
    parser.add_argument("--repeats", type=int, default=5, help="Turns in which every engine runs once.")
    parser.add_argument("--only", choices=("products", "models"), help="A part alone; the checks come first in any.")
    parser.add_argument("--json", type=Path, help="A file for all figures.")
    return parser.parse_args()


def main() -> None:
    asked, found = arguments(), dict[str, Any]()
    device = torch.device(asked.device)
    print(f"{probe(device).name}, torch {torch.__version__}")
    if bad := checked(device, asked.prompt):
        sys.exit("over the float rule, so nothing is timed:\n" + "\n".join(bad))
    if device.type == "cuda" and asked.only != "models":
        found["products"] = products(device, asked.prompt)
    if asked.only != "products":
        found["models"] = models(asked)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
