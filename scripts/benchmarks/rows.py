"""Times products of 16 to 64 tokens: by the HIP kernel with int4 weights, by Triton and by torch."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.bench.timing import measure_replays
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.kernels.ops.linear.fused_linear import gated
from accelpatch.kernels.ops.linear.tiled_int4_linear import by_triton
from benchmarks.layer_shapes import LAYER, rotation
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import Library, Packed, pack

FORMAT, BITS = "int4_g128_minimum", 4.25


def packs(n: int, k: int) -> list[Packed]:
    """Weights in rotation; the first has its meaning in float64."""
    first = pack(torch.randn(n, k, device="cuda") / k**0.5, FORMAT, dtype=torch.float16)
    first = replace(first, format=replace(first.format, library="int4_gemm"))
    assert first.scale is not None
    assert first.offset is not None
    rest = rotation(n, k, BITS) - 1
    copies = [
        replace(first, w=first.w.clone(), scale=first.scale.clone(), offset=first.offset.clone(), dense=None)
        for _ in range(rest)
    ]
    return [first, *copies]


def by_hip(lib: Library, held: list[Packed], x: Tensor, cluster: int) -> float:
    y = torch.empty(x.shape[0], held[0].n, device="cuda", dtype=x.dtype)
    lib.call(held[0], x, y, blocks=cluster)
    if reason := wrong(y, held[0].dense, x, {}):
        raise SystemExit(f"{held[0].n} x {held[0].k} M={x.shape[0]}, clusters of {cluster}: {reason}")
    return measure_replays(lambda: [lib.call(p, x, y, blocks=cluster) for p in held]).median / len(held)


def by_others(held: list[Packed], x: Tensor) -> dict[str, float]:
    n, k = held[0].n, held[0].k
    tiles = [Tiles(p.w, p.scale, p.offset, n, k, 128, "minimum") for p in held if p.scale is not None]
    triton = measure_replays(lambda: [by_triton(x, *one, None) for one in tiles]).median / len(held)
    dense = [torch.randn(n, k, device="cuda", dtype=x.dtype) for _ in range(rotation(n, k, 16))]
    by_torch = measure_replays(lambda: [functional.linear(x, w) for w in dense]).median / len(dense)
    return {"Triton": triton, "torch": by_torch}


def floats(n: int, k: int, x: Tensor, gate: bool) -> dict[str, float]:
    """bf16, by Triton and by torch, a gate with its activation."""
    held = [torch.randn(n, k, device="cuda", dtype=x.dtype) / k**0.5 for _ in range(rotation(n, k, 16))]

    def by_torch(w: Tensor) -> Tensor:
        y = functional.linear(x, w)
        return gated(y, "silu") if gate else y

    kind = {"activation": "silu_gate"} if gate else {}
    if reason := wrong(float_linear.by_triton(x, held[0], gate=gate), held[0], x, kind):
        raise SystemExit(f"{n} x {k} M={x.shape[0]}: {reason}")
    ways = {"Triton": lambda w: float_linear.by_triton(x, w, gate=gate), "torch": by_torch}
    return {
        name: measure_replays(lambda way=way: [way(w) for w in held]).median / len(held) for name, way in ways.items()
    }


def show(options: argparse.Namespace) -> None:
    """A line for each shape and number of tokens, then the four together."""
    lib = None if options.libraries is None else Library(options.libraries)
    total = dict[tuple[int, str], float]()
    print(torch.cuda.get_device_name(), flush=True)
    for which, n, k in LAYER:
        held = [] if options.floats else packs(n, k)
        for m in options.tokens:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            if lib is None or options.floats:
                found = floats(n, k, x, which == "gate_up")
            else:
                found = {f"HIP, clusters {c}" if c else "HIP": by_hip(lib, held, x, c) for c in options.clusters}
                found |= {} if options.alone else by_others(held, x)
            for name, time in found.items():
                total[m, name] = total.get((m, name), 0.0) + time
            line = "  ".join(f"{name} {time * 1e6:6.2f}" for name, time in found.items())
            print(f"{which:8} {n:6} x {k:5} M={m:2}  {line}", flush=True)
    for (m, name), time in total.items():
        print(f"together M={m:2} {name:16} {time * 1e6:6.1f} us", flush=True)
