"""decode_attention against torch's own attention and the read limit, over a static cache; parity comes first.

    python scripts/bench.py attention [--kv-heads 32 8] [--batches 1 8] [--contexts 128 1024 4096 16384] [--limit 4.49]

Medians of graph replays and their spread; caches rotate beyond L2. Ours turns q and k and writes the new k and v
besides; torch's gets q ready and the cache as it is. Of torch's backends the fastest counts, heads shared where it can;
"as called" is the one that scaled_dot_product_attention takes by itself. "ours" is a launch among others like it, which
may begin before the one before it ends; "alone" is what it adds to a kernel of torch's before it that lets nothing
begin early. Ratios are torch's time over ours.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import measure_replays
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check import attention_check
from accelpatch.kernels.hip import binding
from accelpatch.kernels.ops.attention import decode_attention
from scripts.benchmarks.harness import Option, Table, common

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BEYOND_L2 = 600 << 20  # bytes of caches in rotation: a graph's first launch, which overlaps with none, is one of many
LEAST, MOST = 4, 200  # of them
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
CASES = {"batches": [1, 8], "kv_heads": [32, 8], "contexts": [128, 256, 1024, 4096, 16384]}  # each by each
OPTIONS = (
    Option("batches", CASES["batches"], "Sequences at once."),
    Option("contexts", CASES["contexts"], "Slots of the cache that are read."),
    Option("kv_heads", CASES["kv_heads"], "Heads of keys and values."), Option("heads", 32, "Heads of queries."),
    Option("size", 128, "Values of a head."), Option("tokens", 1, "New tokens of a sequence."),
    *common(repeats=12),
    Option("limit", None, "The read limit of this GPU. It is measured if not given.", kind=float, metavar="TB/S"),
    Option("kernel", "hip", "Whose kernel is timed.", attention_check.IMPLEMENTATIONS),
    Option("torch", True, "Time torch's attention beside it."),
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One layer's attention in a decode step; a share of the limit counts the bytes of the cache that it reads."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    size: int
    tokens: int

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.context * self.size * DTYPE.itemsize


class Caches:
    """Rotating caches of a step, the last `tokens` slots of `context` to be written, and what else a call takes."""

    def __init__(self, step: Step, kernel: Callable[..., Tensor], repeats: int):
        capacity = -(-step.context // 256) * 256
        size = 2 * step.batch * step.kv_heads * capacity * step.size * DTYPE.itemsize
        options: Any = {"device": DEVICE, "dtype": DTYPE}
        self.kernel, self.step, self.repeats = kernel, step, repeats
        count = max(LEAST, min(MOST, -(-BEYOND_L2 // size)))
        self.held = [torch.randn(2, step.batch, step.kv_heads, capacity, step.size, **options) for _ in range(count)]
        frequencies = 10000 ** (-torch.arange(0, step.size, 2, device=DEVICE) / step.size)
        self.shape = AttentionShape(step.heads, step.kv_heads, step.size, step.size**-0.5, frequencies)
        self.qkv = torch.randn(step.batch * step.tokens, self.shape.columns, **options)
        first = step.context - step.tokens
        positions = (first + torch.arange(step.tokens, device=DEVICE)).repeat(step.batch, 1)
        mask = torch.ones(step.batch, capacity, dtype=torch.int64, device=DEVICE)
        self.rest = (positions, torch.full((step.batch,), first, device=DEVICE), mask)

    def timed(self, work: Callable[[Tensor, Tensor], object]) -> tuple[float, float]:
        """Microseconds of one of the calls, a cache each, and their spread (max - min over median)."""
        taken = measure_replays(lambda: [work(keys, values) for keys, values in self.held], self.repeats)
        return 1e6 * taken.median / len(self.held), taken.spread

    def ours(self, keys: Tensor, values: Tensor) -> Tensor:
        with binding.weight_prefetch():
            return self.kernel(self.qkv, *self.rest, keys, values, self.shape)

    def alone(self) -> float:
        """What each adds to a kernel that makes qkv and lets nothing begin early."""

        def after_another(keys: Tensor, values: Tensor) -> None:
            self.qkv.mul_(1.0)
            self.ours(keys, values)

        return self.timed(after_another)[0] - self.timed(lambda keys, values: self.qkv.mul_(1.0))[0]

    def by_torch(self, backend: SDPBackend | None) -> float:
        """By a backend, or by the one that torch chooses."""
        step, group = self.step, self.step.heads // self.step.kv_heads
        q = self.qkv[:, : step.heads * step.size].view(step.batch, step.tokens, step.heads, step.size).transpose(1, 2)

        def attend(keys: Tensor, values: Tensor) -> None:
            k, v = keys[:, :, : step.context], values[:, :, : step.context]
            if group > 1 and backend is SDPBackend.EFFICIENT_ATTENTION:
                k, v = (one[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for one in (k, v))
            functional.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != step.heads)

        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return self.timed(attend)[0]

    def torch_times(self) -> Iterator[tuple[float, str]]:
        for name, backend in BACKENDS.items():
            try:
                yield self.by_torch(backend), name
            except RuntimeError as error:  # a backend that does not take this shape has no time
                print(f"  {name}: {str(error).splitlines()[0]}", flush=True)

    def check(self) -> None:
        """The float rule against float32 throughout."""
        keys, values = self.held[0]
        due = decode_attention.reference_(self.qkv.float(), *self.rest, keys.float(), values.float(), self.shape)
        plain = decode_attention.reference_(self.qkv, *self.rest, keys.clone(), values.clone(), self.shape)
        for _ in range(3):
            mine = self.ours(keys, values)
            errors = [(one.float() - due).abs().max().item() for one in (plain, mine)]
            assert errors[1] <= 2 * errors[0] + torch.finfo(DTYPE).eps * due.abs().max().item(), (self.step, errors)


def figures(step: Step, asked: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The row of a step."""
    caches = Caches(step, attention_check.IMPLEMENTATIONS[asked.kernel], asked.repeats)
    best, backend = min(caches.torch_times()) if asked.torch else (0.0, "")
    called = caches.by_torch(None) if asked.torch else 0.0
    caches.check()
    (ours, spread), alone = caches.timed(caches.ours), caches.alone()
    row: dict[str, Any] = {"rows": step.batch, "KV heads": step.kv_heads, "context": step.context}
    row |= {"MB": step.bytes / 1e6, "ours, us": ours, "spread": spread, "alone, us": alone}
    row["share"] = step.bytes / ours * 1e6 / limit
    if asked.torch:
        row |= {"torch, us": best, "backend": backend, "ratio": best / ours, "ratio alone": best / alone}
        row |= {"as called, us": called, "ratio as called": called / ours, "ratio as called, alone": called / alone}
    return row


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row for each combination."""
    torch.manual_seed(0)
    limit = asked.limit * 1e12 if asked.limit else read_limit(DEVICE).bytes_per_second
    printed = Table(f"{DTYPE}, read limit {limit / 1e12:.3f} TB/s, median of {asked.repeats} replays")
    for batch, kv_heads, context in itertools.product(asked.batches, asked.kv_heads, asked.contexts):
        printed.add(figures(Step(batch, context, asked.heads, kv_heads, asked.size, asked.tokens), asked, limit))
        torch.cuda.empty_cache()
    return {"read_limit": limit, "rows": printed.rows}
