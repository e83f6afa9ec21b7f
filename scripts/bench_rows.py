"""Times products of 16 to 64 tokens: int4's HIP kernel beside Triton's and torch's in bf16; or bf16's beside torch's.

    python scripts/bench_rows.py --libraries DIR [--tokens 16 32 64] [--clusters 0 1 2 4 8]
    python scripts/bench_rows.py --floats [--tokens 16 32 64]

The four products of a Llama-2-7B layer, microseconds each and together; medians of graph replays, weights in rotation
beyond L2, each product checked by the float rule before it is timed. --clusters: blocks that share K, 0 for the
kernel's own choice.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from bench_kernels import LAYER
from check_kernels import wrong
from hip_gemv import Library, Packed, pack
from replay import rotation, seconds
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import gemv, parity
from accelpatch.kernels.fused_linear import gated
from accelpatch.kernels.int4_tiles import Tiles
from accelpatch.kernels.tiled_int4_linear import by_triton

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
    if reason := wrong(y, held[0], x, {}):
        raise SystemExit(f"{held[0].n} x {held[0].k} M={x.shape[0]}, clusters of {cluster}: {reason}")
    return seconds(lambda: [lib.call(p, x, y, blocks=cluster) for p in held])[0] / len(held)


def by_others(held: list[Packed], x: Tensor) -> dict[str, float]:
    n, k = held[0].n, held[0].k
    tiles = [Tiles(p.w, p.scale, p.offset, n, k, 128, "minimum") for p in held if p.scale is not None]
    triton = seconds(lambda: [by_triton(x, *one, None) for one in tiles])[0] / len(held)
    dense = [torch.randn(n, k, device="cuda", dtype=x.dtype) for _ in range(rotation(n, k, 16))]
    return {"Triton": triton, "torch": seconds(lambda: [functional.linear(x, w) for w in dense])[0] / len(dense)}


def floats(n: int, k: int, x: Tensor, gate: bool) -> dict[str, float]:
    """bf16, by Triton and by torch, a gate with its activation."""
    held = [torch.randn(n, k, device="cuda", dtype=x.dtype) / k**0.5 for _ in range(rotation(n, k, 16))]

    def by_torch(w: Tensor) -> Tensor:
        y = functional.linear(x, w)
        return gated(y, "silu") if gate else y

    def due(dtype: torch.dtype) -> Tensor:
        y = functional.linear(x.to(dtype), held[0].to(dtype))
        first, second = y.chunk(2, -1)
        return functional.silu(first) * second if gate else y

    exact, plain = due(torch.float64), due(x.dtype)
    found = parity.compare(gemv.by_gemm(x, held[0], gate=gate), exact, parity.torch_error(plain, exact))
    if not found.ok:
        raise SystemExit(f"{n} x {k} M={x.shape[0]}: {found.reason}")
    ways = {"Triton": lambda w: gemv.by_gemm(x, w, gate=gate), "torch": by_torch}
    return {name: seconds(lambda way=way: [way(w) for w in held])[0] / len(held) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--floats", action="store_true", help="bf16 weights, which need no library")
    parser.add_argument("--tokens", nargs="*", type=int, default=[16, 32, 64])
    parser.add_argument("--clusters", nargs="*", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--alone", action="store_true", help="without Triton's and torch's products")
    options = parser.parse_args()
    torch.manual_seed(0)
    if not options.floats and options.libraries is None:
        parser.error("--libraries DIR, or --floats")
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


if __name__ == "__main__":
    main()
