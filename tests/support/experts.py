"""Random arguments of the operations over experts."""

from __future__ import annotations

import random
from typing import Any

import torch

from accelpatch.kernels.ops.experts.cases import of_random
from accelpatch.kernels.ops.experts.packed_experts import packed


def random_experts(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    """Experts of every kind of weight and of odd sizes, some without a token, or with ids that no expert has."""
    tokens, number, top_k = rng.choice((0, 1, 2, 7, 129)), rng.randint(1, 6), rng.randint(1, 3)
    if op == "choose_experts":
        logits = torch.stack([torch.randperm(70, generator=generator) for _ in range(tokens)] or [torch.empty(0, 70)])
        return logits[:tokens].reshape(tokens, 70).to(dtype) / 8, top_k, rng.random() < 0.5, rng.random() < 0.5
    bits = rng.choice((4, 8) if op == "packed_experts" else (4, 8, 16))
    step = 32 if op == "packed_experts" or bits == 4 else 1
    width, inner = step * rng.randint(1, 4), step * rng.randint(1, 4)
    group = rng.choice((32, 0)) if step == 32 else 0
    x, weights = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (width, top_k))
    ids, bias, symmetric = (
        torch.randint(-1, number + 1, (tokens, top_k), generator=generator),
        *(rng.random() < 0.5 for _ in range(2)),
    )
    codes = rng.choice(("", "e2m1")) if bits == 4 and group == 32 else ""
    up, down = (
        of_random(generator, dtype, torch.device("cpu"), bits, number, n, k, group, bias, symmetric, codes)
        for n, k in ((2 * inner, width), (width, inner))
    )
    gate = (rng.choice(("silu", "gelu_tanh", "clamped_swiglu")), 1.702, 7.0)
    if op == "packed_experts":
        return x, ids, weights, *packed(up, width), *packed(down, inner), *gate
    rest = *up, *down, *gate, rng.choice((None, x.flip(0)))
    if op == "routed_experts":
        logits = torch.stack(
            [torch.randperm(number, generator=generator) for _ in range(tokens)] or [torch.empty(0, number)]
        )
        logits, norm = logits[:tokens].reshape(tokens, number).to(dtype) / 4, torch.randn(width, generator=generator)
        flags = (rng.random() < 0.5 for _ in range(3))
        return x, norm.to(dtype), 1e-5, next(flags), logits, min(top_k, number), *flags, *rest
    return x, ids, weights, *rest
