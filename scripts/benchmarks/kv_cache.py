"""KV caches in 8 bits beside the model's own dtype: decode attention alone, and whole steps of a patched model.

    python scripts/bench.py kv_cache [--model llama2-7b] [--recipes exact int4] [--formats int8 fp8]
                                     [--cases 1x32768 1x4096 16x4096] [--repeats 12]

A case is sequences x cached tokens. The kernel: medians of graph replays, caches rotating beyond L2; before it is timed
its output is held to the reference over the same cache. A step: the captured step of the model with random weights,
replayed at that length. Ratios are the time over a cache in the model's dtype over the format's: what bytes allow is
256 / 130 for heads of 128 columns. GB: of the cache of all layers, for all sequences.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from typing import Any

import torch

import accelpatch
from accelpatch.bench.timing import measure_replays, once
from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.kv_states import FLOAT, floats, tensors_of, zeros
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.recipe.recipe import Runtime
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime
from scripts.benchmarks.engines import random_model
from scripts.benchmarks.harness import Option, Table, cases, common

DTYPE, BEYOND_L2, REPLAYS = torch.bfloat16, 600 << 20, 20
CASES = ["1x32768", "1x4096", "16x4096"]
FORMATS = ["int8", "fp8"]
OPTIONS = (
    *common(model="llama2-7b", device="cuda", recipes=["exact", "int4"], repeats=12), cases(CASES),
    Option("formats", FORMATS, "Formats of the cache beside the model's dtype.", FORMATS),
    Option("heads", 32, "Heads of queries, of the kernel alone."),
    Option("kv_heads", 32, "Heads of keys and values, of the kernel alone."),
    Option("size", 128, "Columns of a head, of the kernel alone."),
)  # fmt: skip


class Kernel:
    """Decode attention of one new token a row over rotating caches in a format."""

    def __init__(self, form: str, rows: int, context: int, asked: argparse.Namespace):
        device, shape = torch.device(asked.device), (rows, asked.kv_heads, context, asked.size)
        size = 2 * rows * asked.kv_heads * context * asked.size
        self.caches = [
            tuple(zeros(form, shape, DTYPE, device) for _ in range(2))
            for _ in range(max(2, min(64, BEYOND_L2 // size)))
        ]
        for one in itertools.chain.from_iterable(self.caches):
            for row in range(rows):  # a row at a time: the rounding makes floats
                one[row] = torch.randn(shape[1:], device=device, dtype=DTYPE)
        frequencies = 10000 ** (-torch.arange(0, asked.size, 2, device=device) / asked.size)
        self.shape = AttentionShape(asked.heads, asked.kv_heads, asked.size, asked.size**-0.5, frequencies)
        self.qkv = torch.randn(rows, self.shape.columns, device=device, dtype=DTYPE)
        slot = torch.full((rows,), context - 1, device=device)
        self.rest = (slot[:, None].contiguous(), slot, torch.ones(rows, context, dtype=torch.int64, device=device))

    def call(self, cache: Any) -> torch.Tensor:
        with binding.weight_prefetch():
            return decode_attention.decode_attention_(self.qkv, *self.rest, *cache, self.shape)

    def check(self, name: str) -> str:
        """The implementation that runs. Ends the program where its output is not the reference's."""
        cache = self.caches[0]
        mine = self.call(cache).float()
        args = (self.qkv, *self.rest, *(floats(one).clone() for one in cache), self.shape)
        due = decode_attention.reference_(*args).float()
        error = float((mine - due).norm() / due.norm())
        if not error < 0.02:
            raise SystemExit(f"{name}: {error:.4f} off the reference: nothing is timed over red")
        given = decode_attention.spec(self.qkv, *self.rest, *cache, self.shape)
        return dispatch.choose(decode_attention.OP, given, probe(self.qkv.device))

    def microseconds(self, repeats: int) -> float:
        taken = measure_replays(lambda: [self.call(cache) for cache in self.caches], repeats)
        return 1e6 * taken.median / len(self.caches)


def kernels(asked: argparse.Namespace) -> Table:
    """The kernel alone, in each case and format."""
    printed = Table("decode attention, a layer")
    for case in asked.cases:
        rows, context = map(int, case.split("x"))
        plain = 0.0
        for form in (FLOAT, *asked.formats):
            kernel = Kernel(form, rows, context, asked)
            ran = kernel.check(f"{case}, {form}")
            taken = kernel.microseconds(asked.repeats)
            plain = plain or taken
            printed.add({"case": case, "cache": form, "kernel": ran, "taken, us": taken, "times": plain / taken})
            del kernel
            _free()
    return printed


def steps(asked: argparse.Namespace) -> Table:
    """Captured steps of the model."""
    printed = Table("a captured step, all layers")
    for recipe in asked.recipes:
        model = random_model(asked)
        accelpatch.patch(model, recipe, verify=False, keep_original="none")
        for case in asked.cases:
            plain = 0.0
            for form in ("auto", *asked.formats):
                taken, held, way = _step(model, asked, form, *map(int, case.split("x")))
                plain = plain or taken
                row = {"recipe": recipe, "case": case, "cache": form, "step, ms": taken, "times": plain / taken}
                printed.add(row | {"cache, GB": held / 1e9, "way": way})
        del model
        _free()
    return printed


def _step(model: Any, asked: argparse.Namespace, form: str, rows: int, context: int) -> tuple[float, int, str]:
    """(milliseconds, bytes of the cache, how it ran) of a step behind `context` - 1 tokens."""
    former: Any = vars(model)[RUNTIME]
    runtime: Any = new_runtime(model.device.type, Runtime(kv_cache=form))
    runtime.code, runtime.unfused = former.code, former.unfused
    former.close()  # its caches
    vars(model)[RUNTIME] = runtime
    _free()
    with runtime.alone():
        if reason := runtime.why_not(model):
            raise SystemExit(f"no captured steps: {reason}")
        step = runtime.step(model, rows, context)
        step.show(context - 1, None)
        found = []

        def begin() -> None:
            step.batch.begin(context - 1, torch.full((rows, 1), context - 1))

        for _ in range(1 + asked.repeats):  # the first time untimed; each replay moves on by a slot
            seconds = 0.0
            for _ in range(REPLAYS):
                begin()
                seconds += once(step.replay, step.batch.device)
            found.append(seconds / REPLAYS)
        layers = step.cache.layers
        held = sum(one.nbytes for layer in layers for both in (layer.keys, layer.values) for one in tensors_of(both))
        return sorted(found[1:])[len(found[1:]) // 2] * 1e3, held, runtime.captured.way(step)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Print both tables."""
    return {"kernel": kernels(asked).rows, "step": steps(asked).rows}
