"""Adapters of the HIP gemv kernels: made, launched, and what they compute, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.gemv_checks import kinds, run
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import Library, Packed, pack


@dataclass(frozen=True)
class Adapters:
    """down[parts * rank, K] and up[N, rank] of a weight whose rows fall into parts, which begin at `starts`."""

    down: Tensor
    up: Tensor
    starts: Sequence[int]
    low: Tensor

    def arguments(self) -> dict[str, int]:
        """Those of a launch."""
        second, third = (*self.starts[1:], *[len(self.up)] * 2)[:2]
        pointers = {name: getattr(self, name).data_ptr() for name in ("down", "up", "low")}
        sizes = {"rank": self.up.shape[1], "ranks": len(self.down), "second_part": second, "third_part": third}
        return pointers | sizes

    @property
    def reset(self) -> bool:
        """As `ready`, of the words of these."""
        return ready(self.low)

    def beside(self, dense: Tensor) -> Tensor:
        """The weight w + up down that a product with these adapters has, on the CPU and in float64."""
        rank, ends = self.up.shape[1], (*self.starts[1:], len(self.up))
        more = torch.zeros_like(dense, dtype=torch.float64)
        for part, (begin, end) in enumerate(zip(self.starts, ends, strict=True)):
            up, down = self.up[begin:end].cpu(), self.down[part * rank : (part + 1) * rank].cpu()
            more[begin:end] = up.double() @ down.double()
        return dense.double() + more


def ready(words: Tensor) -> bool:
    """Whether words are as a launch must find them: the buffer whose turn is next, and what counts blocks."""
    number = int(words[-4])
    following = words[:-4].chunk(2)[number >> 16 & 1]
    return bool((following == -1).all()) and number & 0xFFFF == 0


def adapters(p: Packed, dtype: torch.dtype, rank: int, starts: Sequence[int], device: Any = "cpu") -> Adapters:
    """Random ones, as large as the weight's own rows."""
    ranks = rank * len(starts)
    down, up = torch.randn(ranks, p.k) / p.k**0.5, torch.randn(p.n, rank) / rank**0.5
    low = torch.full((ranks * 128 + 4,), -1, dtype=torch.int32, device=device)
    low[-4:] = 0
    return Adapters(down.to(device, dtype), up.to(device, dtype), tuple(starts), low)


SHAPES = [(100, 576), (80, 11008), (24, 6144), (7, 200), (96, 128)]  # odd ends, K in several tiles, blocks without one
RUNS: tuple[tuple[int, dict[str, int]], ...] = (
    (8, {"blocks": 2}),
    (3, {"blocks": 3}),
    (1, {"blocks": 3, "shallow": 1}),
    (2, {}),
    (1, {}),
)


def parts_of(n: int, gate: bool) -> tuple[int, ...]:
    """Where the parts of n rows begin: gate and up, or three that end within a tile, or one."""
    return (0, n // 2) if gate else (0, n // 3, n // 2) if n % 2 == 0 else (0,)


def check_low_rank(lib: Library, name: str, dtype: torch.dtype, device: str = "cuda", meets: bool = True) -> list[str]:
    """A few shapes of one format, every norm and the gate: by the float rule; a row's bits alone.

    meets: whether blocks wait for each other, so that words are used and reset.
    """
    bad, ran = [], 0
    for n, k in SHAPES:
        for kind_name in ("product", "residual", "rms", "layer", "silu_gate"):
            gate = kind_name == "silu_gate"
            if (gate and n % 2) or (kind_name in ("layer", "residual") and k > 1000):
                continue
            p = pack(torch.randn(n, k) / k**0.5, name, dtype=dtype, interleaved=gate)
            low = adapters(p, dtype, (8, 16)[ran % 2], parts_of(n, gate), device)
            kind = {key: one.to(device) if isinstance(one, Tensor) else one
                    for key, one in kinds(n, k, 8, dtype, "cpu")[kind_name].items()}  # fmt: skip
            x, results, there = torch.randn(8, k, dtype=dtype).to(device), [], p.to(device)
            for m, tuning in RUNS:
                part = {**kind, "residual": kind["residual"][:m]} if "residual" in kind else kind
                results.append(run(lib, there, x[:m], {**part, **low.arguments()}, **tuning).cpu())
                if meets and not low.reset:
                    bad.append(f"{name} {dtype} N={n} K={k} {kind_name}, M={m}: words are left behind")
            ran += 1
            own = {key: one.cpu() if isinstance(one, Tensor) else one for key, one in kind.items()}
            if reason := wrong(results[0], low.beside(p.dense), x.cpu(), own):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: {reason}")
            if any(not torch.equal(y, results[0][: len(y)]) for y in results):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: other bits alone than among others")
    return bad
