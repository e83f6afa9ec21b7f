"""Topics of the attention of a decode step: beside torch's and the read limit, and over KV caches in 8 bits."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import accelpatch
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import once, timing
from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check import attention_check
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.kv_states import FLOAT, floats, tensors_of, zeros
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.recipe.recipe import Runtime
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime
from scripts.benchmarks.engines import freed, random_model
from scripts.benchmarks.harness import TINY, Option, Table, Topic, common
from scripts.benchmarks.kernels import timed

DTYPE = torch.bfloat16
BEYOND_L2 = 600 << 20  # bytes of caches in rotation: a graph's first launch, which overlaps with none, is one of many
LEAST, MOST = 4, 200  # of them
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
Found = dict[str, Any]


class Caches:
    """Rotating caches of one layer's attention in a decode step, the last slot to be written, and what a call takes."""

    def __init__(self, asked: argparse.Namespace, batch: int, context: int, kv_heads: int, form: str = FLOAT):
        self.device, self.repeats, self.context, size = torch.device(asked.device), asked.repeats, context, asked.size
        self.form, self.bytes = form, 2 * batch * kv_heads * context * size * DTYPE.itemsize
        shape, tokens = (batch, kv_heads, -(-context // 256) * 256, size), getattr(asked, "tokens", 1)
        count = 1 if asked.tiny else max(LEAST, min(MOST, -(-BEYOND_L2 // self.bytes)))
        self.held = [tuple(zeros(form, shape, DTYPE, self.device) for _ in range(2)) for _ in range(count)]
        for one in itertools.chain.from_iterable(self.held):
            for row in range(batch):  # a row at a time: the rounding makes floats
                one[row] = torch.randn(shape[1:], device=self.device, dtype=DTYPE)
        frequencies = 10000 ** (-torch.arange(0, size, 2, device=self.device) / size)
        self.shape = AttentionShape(asked.heads, kv_heads, size, size**-0.5, frequencies)
        self.qkv = torch.randn(batch * tokens, self.shape.columns, device=self.device, dtype=DTYPE)
        first = context - tokens
        positions = (first + torch.arange(tokens, device=self.device)).repeat(batch, 1)
        mask = torch.ones(batch, shape[2], dtype=torch.int64, device=self.device)
        self.rest = (positions, torch.full((batch,), first, device=self.device), mask)
        self.kernel: Callable[..., Tensor] = decode_attention.decode_attention_

    def timed(self, work: Callable[..., object]) -> tuple[float, float]:
        """Microseconds of one of the calls, a cache each, and their spread (max - min over median)."""
        taken = timed(lambda: [work(*cache) for cache in self.held], self.device, self.repeats)
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
        heads, kv_heads, size = self.shape.heads, self.shape.kv_heads, self.shape.size
        q = self.qkv[:, : heads * size].view(len(self.rest[1]), -1, heads, size).transpose(1, 2)

        def attend(keys: Tensor, values: Tensor) -> None:
            k, v = keys[:, :, : self.context], values[:, :, : self.context]
            if heads > kv_heads and backend is SDPBackend.EFFICIENT_ATTENTION:
                k, v = (one[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2) for one in (k, v))
            functional.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != heads)

        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return self.timed(attend)[0]

    def torch_times(self) -> Iterator[tuple[float, str]]:
        for name, backend in BACKENDS.items():
            try:
                yield self.by_torch(backend), name
            except RuntimeError as error:  # a backend that does not take this shape has no time
                print(f"  {name}: {str(error).splitlines()[0]}", flush=True)

    def check(self) -> str:
        """The implementation that would be chosen. Ends the program where the output is not the reference's.

        A float cache is held to the float rule, against float32 throughout; others, whose new slot is rounded, to 2%.
        """
        cache = self.held[0]
        plain = [floats(one).clone() for one in cache]
        due = decode_attention.reference_(self.qkv.float(), *self.rest, *(one.float() for one in plain), self.shape)
        error = (decode_attention.reference_(self.qkv, *self.rest, *plain, self.shape).float() - due).abs().max()
        bound = 2 * error + torch.finfo(DTYPE).eps * due.abs().max()
        for _ in range(3):
            apart = self.ours(*cache).float() - due
            over = apart.abs().max() > bound if self.form == FLOAT else apart.norm() > 0.02 * due.norm()
            if over or not apart.isfinite().all():
                raise SystemExit(f"{self.form}, {self.context}: over the bound: nothing is timed over red")
        return dispatch.choose(
            decode_attention.OP, decode_attention.spec(self.qkv, *self.rest, *cache, self.shape), probe(self.device)
        )


def attention(asked: argparse.Namespace) -> Found:
    """A row for each combination. Ratios are torch's time over ours."""
    torch.manual_seed(0)
    if asked.tiny:
        asked.batches, asked.contexts, asked.heads, asked.kv_heads = [1, 2], [64, 256], 4, [4, 2]
    limit = asked.limit * 1e12 if asked.limit else read_limit(torch.device(asked.device)).bytes_per_second
    printed = Table(f"{DTYPE}, read limit {limit / 1e12:.3f} TB/s, median of {asked.repeats} replays")
    for batch, kv_heads, context in itertools.product(asked.batches, asked.kv_heads, asked.contexts):
        caches = Caches(asked, batch, context, kv_heads)
        if asked.kernel:
            caches.kernel = attention_check.IMPLEMENTATIONS[asked.kernel]
        best, backend = min(caches.torch_times())
        called = caches.by_torch(None)
        caches.check()
        (ours, spread), alone = caches.timed(caches.ours), caches.alone()
        printed.add({
            "rows": batch, "KV heads": kv_heads, "context": context, "MB": caches.bytes / 1e6, "ours, us": ours,
            "spread": spread, "alone, us": alone, "share": caches.bytes / ours * 1e6 / limit, "torch, us": best,
            "backend": backend, "ratio": best / ours, "ratio alone": best / alone, "as called, us": called,
        })  # fmt: skip
        del caches
        freed()
    return {"read_limit": limit, "rows": printed.rows}


def kv_cache(asked: argparse.Namespace) -> Found:
    """The kernel alone, in each case and format, and captured steps of the model."""
    if asked.tiny:
        asked.cases, asked.heads, asked.kv_heads = ["1x256", "2x64"], 4, 4
    printed = Table("decode attention, a layer")
    for case in asked.cases:
        plain = 0.0
        for form in (FLOAT, *asked.formats):
            rows, context = map(int, case.split("x"))
            caches = Caches(asked, rows, context, asked.kv_heads, form)
            row = {"case": case, "cache": form, "kernel": caches.check()}
            taken = caches.timed(caches.ours)[0]
            plain = plain or taken
            printed.add(row | {"taken, us": taken, "times": plain / taken})
            del caches
            freed()
    captured = steps(asked, asked.recipes) if asked.device != "cpu" else []  # a CPU captures none
    return {"kernel": printed.rows, "step": captured}


def steps(asked: argparse.Namespace, recipes: Sequence[str]) -> list[Found]:
    """Captured steps of the model."""
    printed = Table("a captured step, all layers")
    for recipe in recipes:
        model = random_model(asked)
        accelpatch.patch(model, recipe, verify=False, keep_original="none")
        for case in asked.cases:
            plain = 0.0
            for form in ("auto", *asked.formats):
                row = {"recipe": recipe, "case": case, "cache": form} | _step(model, asked, form, case)
                plain = plain or row["step, ms"]
                printed.add(row | {"times": plain / row["step, ms"]})
        del model
        freed()
    return printed.rows


def _step(model: Any, asked: argparse.Namespace, form: str, case: str) -> Found:
    """Of a step behind so many cached tokens less one: milliseconds, the cache's size, and how it ran."""
    rows, context = map(int, case.split("x"))
    former: Any = vars(model)[RUNTIME]
    runtime: Any = new_runtime(model.device.type, Runtime(kv_cache=form))
    runtime.code, runtime.unfused = former.code, former.unfused
    former.close()  # its caches
    vars(model)[RUNTIME] = runtime
    freed()
    with runtime.alone():
        if reason := runtime.why_not(model):
            raise SystemExit(f"no captured steps: {reason}")
        step = runtime.step(model, rows, context)
        step.show(context - 1, None)

        def replayed() -> float:
            step.batch.begin(context - 1, torch.full((rows, 1), context - 1))  # each replay moves on by a slot
            return once(step.replay, step.batch.device)

        sums = [sum(replayed() for _ in range(20)) / 20 for _ in range(1 + asked.repeats)]
        every = [one for layer in step.cache.layers for both in (layer.keys, layer.values) for one in tensors_of(both)]
        return {"step, ms": 1e3 * timing(sums[1:]).median, "cache, GB": sum(one.nbytes for one in every) / 1e9,
                "way": runtime.captured.way(step)}  # fmt: skip


HEADS = (Option("heads", 32, "Heads of queries."), Option("size", 128, "Values of a head."), TINY)
TOPICS = {
    "attention": Topic(
        "decode_attention against torch's own attention and the read limit, over a static cache; parity first.\n\n"
        "Medians of graph replays and their spread; caches rotate beyond L2. Ours turns q and k and writes the new k\n"
        "and v besides; torch's gets q ready and the cache as it is. Of torch's backends the fastest counts, heads\n"
        'shared where it can; "as called" is the one that scaled_dot_product_attention takes by itself. "ours" is a\n'
        'launch among others like it, which may begin before the one before it ends; "alone" is what it adds to a\n'
        "kernel of torch's before it that lets nothing begin early. Ratios are torch's time over ours.",
        (Option("batches", [1, 8], "Sequences at once."),
         Option("contexts", [128, 256, 1024, 4096, 16384], "Slots of the cache that are read."),
         Option("kv_heads", [32, 8], "Heads of keys and values."), *common(device="cuda", repeats=12), *HEADS,
         Option("tokens", 1, "New tokens of a sequence."),
         Option("limit", None, "The read limit of this GPU. It is measured if not given.", kind=float, metavar="TB/S"),
         Option("kernel", None, "A kernel in place of the chosen one.", attention_check.IMPLEMENTATIONS)),
        attention,
    ),
    "kv_cache": Topic(
        "KV caches in 8 bits beside the model's own dtype: decode attention alone, and whole steps.\n\n"
        "A case is sequences x cached tokens. The kernel: medians of graph replays, caches rotating beyond L2, after\n"
        "its output is held to the reference over the same cache. A step: the captured step of the model with random\n"
        "weights, replayed at that length. Times: of a cache in the model's dtype over the format's; what bytes allow\n"
        "is 256 / 130 for heads of 128 columns. GB: of the cache of all layers, for all sequences.",
        (*common(model="llama2-7b", device="cuda", recipes=["exact", "int4"], repeats=12),
         Option("cases", ["1x32768", "1x4096", "16x4096"], "Sequences x cached tokens."),
         Option("formats", ["int8", "fp8"], "Formats of the cache.", ["int8", "fp8"]),
         Option("kv_heads", 32, "Heads of keys and values, of the kernel alone."), *HEADS),
        kv_cache,
    ),
}  # fmt: skip
