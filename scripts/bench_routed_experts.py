"""The experts' half of a layer of a decode step, 4 bits: norm, router, choice and experts in five launches and three.

    python scripts/bench_routed_experts.py [--shapes mixtral qwen3_moe] [--tokens 1 2 4] [--layers 16] [--copies 4]
        [--repeats 12]

Each shape is first held to the float rule. Then both ways run layer behind layer in a captured graph, as a decode step
has them, with launches that overlap: `parts` is norm, router, choice, gate and up, down; `inside` is router and the
experts' two, which take norm and choice in. `--copies` layers have weights of their own, more than a cache holds. It
needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelpatch.bench.timing import measure_replays
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.experts import choose_experts, experts, routed_experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm

#: (E, H, I, experts a token)
SHAPES = {"mixtral": (8, 4096, 14336, 2), "qwen3_moe": (128, 2048, 768, 8)}
DTYPE = torch.bfloat16
Layer = tuple[FusedLinear, FusedNorm, tuple[Any, ...]]
Way = Callable[[Tensor, Layer, int], Tensor]


def layer_of(shape: str, seed: int) -> Layer:
    """Router, norm, and the weights of experts."""
    number, width, inner, _ = SHAPES[shape]
    generator, device = torch.Generator().manual_seed(seed), torch.device("cuda")
    up, down = (
        of_random(generator, DTYPE, device, 4, number, n, k, 128, False, False)
        for n, k in ((2 * inner, width), (width, inner))
    )
    weight = torch.randn(number, width, generator=generator).to(device, DTYPE) / width**0.5
    norm = FusedNorm(torch.ones(width, device=device, dtype=DTYPE), 1e-6)
    return FusedLinear(Plain(weight)), norm, tuple(part for one in in_tiles(up, down, inner) for part in one)


def inside(x: Tensor, layer: Layer, chosen: int) -> Tensor:
    """Three launches."""
    router, norm, weights = layer
    logits = router(x, norm)
    return routed_experts.routed_experts(
        x, norm.weight, norm.eps, False, logits, chosen, True, True, *weights, "silu", 0.0, 0.0, x
    )


def parts(x: Tensor, layer: Layer, chosen: int) -> Tensor:
    """Five."""
    router, norm, weights = layer
    normal, _ = norm.of_sum(x)
    ids, factors = choose_experts.choose_experts(router.large_m(normal), chosen, True, True)
    return experts.experts(normal, ids, factors, *weights, "silu", 0.0, 0.0, x)


def held_to_the_float_rule(x: Tensor, layer: Layer, chosen: int) -> str:
    """What is wrong with `inside`; nothing where it is right."""
    router, norm, weights = layer
    args = (x, norm.weight, norm.eps, False, router(x, norm), chosen, True, True, *weights, "silu", 0.0, 0.0, x)
    with dispatch.forced("hip"):
        made = routed_experts.routed_experts(*args)
    return parity.check(routed_experts.OP, args, (made,))[0].reason


def seconds(way: Way, x: Tensor, layers: list[Layer], chosen: int, asked: argparse.Namespace) -> float:
    """Of one layer."""

    def step() -> Tensor:
        y = x
        for place in range(asked.layers):
            y = way(y, layers[place % len(layers)], chosen)
        return y

    with weight_prefetch():
        return measure_replays(step, asked.repeats).median / asked.layers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES], help="The models' shapes.")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4], help="Tokens of a step.")
    parser.add_argument("--layers", type=int, default=16, help="Layers in a graph.")
    parser.add_argument("--copies", type=int, default=4, help="Different weights among them.")
    parser.add_argument("--repeats", type=int, default=12, help="Replays to take the median of.")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {asked.layers} layers in a graph", flush=True)
    for shape in asked.shapes:
        chosen, layers = SHAPES[shape][3], [layer_of(shape, seed) for seed in range(asked.copies)]
        for tokens in asked.tokens:
            x = torch.randn(tokens, SHAPES[shape][1], device="cuda", dtype=DTYPE)
            if reason := held_to_the_float_rule(x, layers[0], chosen):
                print(f"{shape}, {tokens} tokens: {reason}")
                return 1
            for way in (parts, inside, parts, inside):
                took = seconds(way, x, layers, chosen, asked)
                print(f"{shape}, {tokens} tokens, {way.__name__}: {1e6 * took:.2f} us a layer", flush=True)
        del layers
    return 0


if __name__ == "__main__":
    sys.exit(main())
