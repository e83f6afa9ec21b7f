"""SmoothQuant's recipes beside the model that is not patched and the other recipes: prompts, decoding, memory.

    python scripts/bench_smoothquant.py [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipes ...]
        [--prompt 2048] [--batches 1 32] [--repeats 5] [--json FILE]

The model has the named shape and random weights; it is patched as users patch it, verified, calibrated on its own text,
and only the originals are freed. Every engine runs once in each of `--repeats` turns. On a GPU the products of one
layer's shapes are timed too: ours with its scales, torch._int_mm, bf16, and a plain Triton product without an epilogue.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.timing import measure_replays, once
from accelpatch.models import load

PEAK = {"sm_90": 1979e12}  # int8 operations a second, without sparsity, as NVIDIA's data sheet has it
RECIPES = ("exact", "int8", "smoothquant", "smoothquant-static")


def engines(asked: argparse.Namespace) -> dict[str, Any]:
    """The unpatched model, and a copy patched by each recipe."""
    base = load.random(asked.model, dtype=getattr(torch, asked.dtype), device=asked.device)
    made: dict[str, Any] = {"unpatched": base}
    for recipe in asked.recipes:
        before = allocated(base)
        model = copy.deepcopy(base)
        accelpatch.patch(model, recipe, keep_original="none")
        report = model.accelpatch.report()
        made[recipe] = model
        print(f"{recipe}: {sum(report.seconds.values()):.1f} s, {len(report.verification.failures)} over their bound, "
              f"{allocated(base) - before:.2f} GB", flush=True)  # fmt: skip
    return made


def allocated(model: Any) -> float:
    """GB in use on the model's device; 0 on a CPU."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device) / 1e9


def timed(made: dict[str, Any], shape: Shape, repeats: int) -> dict[str, tuple[float, float]]:
    """Engine -> median seconds of a generate() call for one token, and of the further tokens."""
    base = made["unpatched"]
    device = next(base.parameters()).device
    ids = prompt_ids(base.config.vocab_size, shape).to(device)
    first: dict[str, list[float]] = {name: [] for name in made}
    more: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(repeats + 2):
        for name, model in made.items():
            one = once(lambda model=model: generate(model, ids, 1), device)
            all_of_it = once(lambda model=model: generate(model, ids, shape.new), device) if shape.new > 1 else one
            if turn > 1:
                first[name].append(one)
                more[name].append(all_of_it - one)
    return {name: (statistics.median(first[name]), statistics.median(more[name])) for name in made}


def products(device: torch.device, rows: int) -> list[dict[str, Any]]:
    """Microseconds of the products of a 7B layer for so many rows."""
    from accelpatch.device import probe

    found, peak = [], PEAK.get(probe(device).arch)
    for n, k in ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)):
        times = {name: measure_replays(call).median for name, call in calls(device, rows, n, k).items()}
        share = f", {2 * rows * n * k / times['ours'] / peak:.0%} of the peak" if peak else ""
        print(f"{rows} x {k} x {n}: {', '.join(f'{name} {1e6 * one:.0f} us' for name, one in times.items())}{share}")
        found.append({"m": rows, "n": n, "k": k, "seconds": times})
    return found


def calls(device: torch.device, m: int, n: int, k: int) -> dict[str, Any]:
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


def plain_triton(a: Tensor, b: Tensor) -> Any:
    """A product of tiles as Triton's tutorial has it, int32 out, with the best of a few sizes."""
    from accelpatch.kernels.triton import gemm_w8a8_kernels as kernels

    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    out = torch.empty(m, n, dtype=torch.int32, device=a.device)

    def of(tile: tuple[int, int, int, int, int]) -> Any:
        rows, columns, depth, warps, stages = tile
        grid = (-(-m // rows) * -(-n // columns), 1)
        return lambda: kernels.tiles[grid](
            a, b, *(out,) * 7, 1.0, 1.0, m, n, k, k, k, 0, 0, False, False, False, False, False, -1,
            False, k % depth == 0, rows, columns, depth, 8, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    tried = [of(tile) for tile in ((128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (128, 128, 128, 8, 4))]
    return min(tried, key=lambda call: measure_replays(call).median)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="Shape of the model, a name of the catalog.")
    parser.add_argument("--device", default="cuda", help="Where it runs.")
    parser.add_argument("--dtype", default="bfloat16", help="Its dtype.")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="What it is patched by.")
    parser.add_argument("--prompt", type=int, default=2048, help="Tokens of the prompt whose time is taken.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="Sequences that are decoded at once.")
    parser.add_argument("--new", type=int, default=64, help="New tokens of each.")
    parser.add_argument("--repeats", type=int, default=5, help="Turns in which every engine runs once.")
    parser.add_argument("--json", type=Path, help="A file for all figures.")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    made, found = engines(asked), dict[str, Any]()
    cases = [Shape(1, asked.prompt, 1), *(Shape(batch, 128, asked.new) for batch in asked.batches)]
    for shape in cases:
        times = timed(made, shape, asked.repeats)
        own = times["unpatched"]
        print(f"\nbatch {shape.batch}, prompt {shape.prompt}, {shape.new} new")
        for name, (first, more) in times.items():
            rate = (
                f", {shape.batch * (shape.new - 1) / max(more, 1e-9):.1f} tokens/s ({own[1] / max(more, 1e-9):.2f})"
                * (shape.new > 1)
            )
            print(f"  {name}: first token {1e3 * first:.1f} ms ({own[0] / first:.2f} of unpatched){rate}", flush=True)
        found[f"{shape.batch}x{shape.prompt}+{shape.new}"] = times
    if torch.device(asked.device).type == "cuda":
        found["products"] = products(torch.device(asked.device), asked.prompt)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
