"""Cases for parity checks of experts, and random weights for them."""

from __future__ import annotations

from typing import Any

import torch

from accelpatch.kernels.codebooks import E4M3, FP8_CODES, NVFP4, scale_dtype
from accelpatch.kernels.layouts.expert_stack import Stack, from_words, to_words
from accelpatch.kernels.spec import Case

CLAMPED = "clamped_swiglu"


def _case(
    bits: int, experts: int, width: int, inner: int, tokens: int, k: int, group: int = 0, activation: str = "silu",
    bias: bool = False, odd: bool = False, tiled: bool = False, codes: str = "",
) -> Case:  # fmt: skip
    def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(tokens, width, generator=generator).to(device, dtype)
        ids = torch.randint(-1 if odd else 0, experts + odd, (tokens, k), generator=generator).to(device)
        weights = torch.rand(tokens, k, generator=generator).to(device, torch.float32 if odd else dtype)
        sizes = ((2 * inner, width), (width, inner))
        stacks = [of_random(generator, dtype, device, bits, experts, *size, group, bias, odd, codes) for size in sizes]
        if tiled:
            stacks = list(in_tiles(stacks[0], stacks[1], inner))
        return x, ids, weights, *stacks[0], *stacks[1], activation, 1.702, 7.0, x.flip(0) if odd else None

    name = f"w{bits}{codes and '-'}{codes}-e{experts}-h{width}-i{inner}-t{tokens}-k{k}-g{group}-{activation}"
    return Case(f"{name}{'-bias' if bias else ''}{'-odd' if odd else ''}{'-tiles' if tiled else ''}", make)


def cases() -> list[Case]:
    """Cases for parity checks: each kind of weight, few and many tokens, experts that get none, ids out of range."""
    return [
        _case(16, 4, 64, 32, 1, 2),
        _case(4, 4, 64, 32, 2, 2, 32),
        _case(4, 2, 256, 384, 1, 2, 128, odd=True),
        _case(8, 3, 96, 48, 7, 2, odd=True),
        _case(4, 6, 160, 96, 1, 3, 32, CLAMPED, bias=True),
        _case(4, 3, 256, 128, 37, 2, 64, odd=True),
        _case(16, 5, 48, 24, 40, 3, activation="gelu_tanh", bias=True),
        _case(8, 2, 130, 66, 33, 1, activation="gelu"),
        _case(4, 2, 384, 128, 5, 2, 128, odd=True),
        _case(4, 3, 64, 32, 0, 2, 32),
        _case(4, 4, 128, 128, 1, 2, 32, tiled=True),
        _case(4, 3, 256, 128, 2, 2, 64, odd=True, tiled=True),
        _case(4, 5, 384, 256, 1, 5, 128, odd=True, tiled=True),
        _case(4, 2, 256, 128, 37, 2, 64, tiled=True),
        _case(4, 3, 128, 384, 21, 2, 32, CLAMPED, bias=True, odd=True, tiled=True),
        _case(4, 2, 256, 256, 9, 1, activation="gelu", tiled=True),
        _case(4, 6, 160, 96, 1, 3, 32, CLAMPED, bias=True, odd=True, codes="e2m1"),
        _case(4, 3, 96, 64, 37, 2, 32, codes="e2m1"),
        _case(4, 4, 256, 128, 2, 2, 32, odd=True, tiled=True, codes="e2m1"),
        _case(4, 3, 128, 384, 37, 2, 32, CLAMPED, bias=True, tiled=True, codes="e2m1"),
        _case(4, 6, 160, 96, 1, 3, 16, odd=True, codes=NVFP4),
        _case(4, 3, 96, 64, 37, 2, 16, CLAMPED, bias=True, codes=NVFP4),
        _case(8, 4, 256, 128, 2, 2, 128, odd=True, codes=FP8_CODES),
        _case(8, 3, 384, 256, 37, 2, 128, CLAMPED, bias=True, codes=FP8_CODES),
    ]


def in_tiles(up: Stack, down: Stack, inner: int) -> tuple[Stack, Stack]:
    """Stacks of 4-bit codes in words, in tiles."""
    (q_up, *up_tables), (q_down, *down_tables) = up, down
    up_codes, down_codes = from_words(q_up, down.n), from_words(q_down, inner)
    tiles = Stack.of_tiles(up_codes, *up_tables, interleaved=True)  # type: ignore[arg-type]
    return tiles, Stack.of_tiles(down_codes, *down_tables, interleaved=False)  # type: ignore[arg-type]


def of_random(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device, bits: int, experts: int, n: int, k: int,
    group: int, bias: bool, symmetric: bool, codes: str = "",
) -> Stack:  # fmt: skip
    """A random Stack, for parity checks. bits: 16 for floats of `dtype`. group: 0 for one scale a row. codes: of a
    codebook's name."""
    bias_values = torch.randn(experts, n, generator=generator).to(device, dtype) if bias else None
    if bits == 16:
        return Stack((torch.randn(experts, n, k, generator=generator) / k**0.5).to(device, dtype), bias=bias_values)
    scale = (torch.rand(experts, n, k // group if group else 1, generator=generator) + 0.5) / k**0.5
    if codes == FP8_CODES:
        q = torch.randn(experts, n, k, generator=generator) * 64
        return Stack(q.to(E4M3).to(device), (scale / 64).to(device), None, bias_values)
    if bits == 8:
        q = torch.randint(-127, 128, (experts, n, k), generator=generator, dtype=torch.int8)
        return Stack(q.to(device), (scale / 64).to(device), None, bias_values)
    q = torch.randint(-128, 128, (experts, n, k // 2), generator=generator, dtype=torch.int8)
    if codes:
        factor = None
        if codes == NVFP4:  # scales of a few hundred, and factors of rows that make the product small again
            scale, factor = (
                scale * 400,
                (torch.rand(experts, n, 1, generator=generator).double() + 0.5).to(device) / 400,
            )
        return Stack(to_words(q).to(device), (scale / 2).to(scale_dtype(codes)).to(device), factor, bias_values)
    half = (scale / 8).to(device, torch.float16)
    return Stack(to_words(q).to(device), half, None if symmetric else -8 * half, bias_values)
