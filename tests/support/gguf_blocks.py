"""Random weights in GGUF's blocks, as arguments of their operations."""

from __future__ import annotations

import random
from typing import Any

import torch

from accelpatch.kernels.layouts.gguf_blocks import FORMS
from accelpatch.kernels.ops.linear.block_linear import random_blocks


def random_args_of_blocks(
    op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Any, ...]:
    m, n, form = rng.choice((0, 1, 2, 7, 129)), rng.randint(1, 70), rng.choice(list(FORMS))
    k = FORMS[form].values * rng.randint(1, 4)
    x, blocks = torch.randn(m, k, generator=generator).to(dtype), random_blocks(generator, n, k, form)
    if op == "block_embedding":
        return torch.randint(0, n, (m, 3), generator=generator), blocks, form, dtype
    return x, blocks, form, rng.choice((None, torch.randn(n, generator=generator).to(dtype)))
