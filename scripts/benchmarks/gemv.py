"""HIP gemv kernels on the GPU that is here: the read limit, a 7B model's linear layers as one graph, and each shape.

    python scripts/bench.py gemv --libraries DIR [--tuning '{"depth": 8}' ...] [--shapes] [--no-chain]

DIR is a folder that `accelpatch build --arch ARCH --out DIR` filled. Figures are medians of graph replays, with weights
in rotation beyond L2, of 1 and 8 tokens: the linear layers of a 7B model (32 layers of four) as one graph, and with
--shapes each shape alone beside its peers: torch, and a plain Triton GEMV. Each product is checked before it is timed;
run scripts/check_kernels.py first all the same.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.bench.read_limit import stream_reads
from accelpatch.bench.timing import Timing, measure_replays
from accelpatch.kernels.hip.binding import SENTINEL
from scripts.benchmarks.harness import Option, Table, cases
from scripts.benchmarks.kernels import HEADS, HIDDEN, LAYER, MIDDLE, rotation
from tests.support import w8a8_fp8_checks
from tests.support.gemv_reference import reference, wrong
from tests.support.hip_gemv import TIMED, W8A8, W8A8_FP8, Library, Packed, library_in, pack
from tests.support.w8a8_checks import reference as integers
from tests.support.w8a8_checks import wrong as wrong_integers

OPTIONS = (
    Option("libraries", [], "Folders of built libraries. Shapes are timed for the first alone.", kind=Path,
           metavar="DIR", required=True),
    cases(["plain", "int8", "int4_g128", "int4_g128_minimum"], f"The formats to time, of {', '.join(TIMED)}.", TIMED),
    Option("tuning", ["{}"], "Launch settings as JSON objects: the chain with each, the shapes with the first.",
           metavar="JSON"),
    Option("tokens", [1, 8], "The numbers of tokens to time."),
    Option("shapes", False, "Time each shape alone too, beside its peers."),
    Option("chain", True, "Time the chain of all layers."),
)  # fmt: skip
BF16 = torch.bfloat16
SIGNALLED = 8192  # columns of the MLP that `down` begins with
LAYERS = 32
Calls = list[Callable[[], Tensor]]


def read_limit(folder: Path) -> float:
    """Bytes a second of the best plain streaming read of 4 GiB."""
    library = ctypes.CDLL(str(library_in(folder, "read_limit")))
    buffer = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
    times = [
        measure_replays(lambda read=read: read(torch.cuda.current_stream().cuda_stream)).median
        for read in stream_reads(library, buffer)
    ]
    return buffer.nbytes / min(times)


def dense(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device="cuda", dtype=BF16) / k**0.5


class Chain:
    """32 layers of the four products, each reading what the one before wrote; fused: norms and residuals inside.

    Without norms a bias on the last product keeps values at an ordinary size: they would end at zero or overflow.
    """

    def __init__(self, lib: Library, name: str) -> None:
        self.lib = lib
        self.weights = [
            [pack(dense(n, k), name, dtype=BF16, interleaved=which == "gate_up", dense=False) for which, n, k in LAYER]
            for _ in range(LAYERS)
        ]
        self.gain = torch.ones(HIDDEN, device="cuda", dtype=BF16)
        self.bias = torch.randn(HIDDEN, device="cuda", dtype=BF16) / 2
        self.bytes = sum(p.bytes for layer in self.weights for p in layer)

    def run(self, m: int, *, fused: bool, **tuning: int) -> Timing:
        h, qkv, o = (torch.randn(m, size, device="cuda", dtype=BF16) for size in (HIDDEN, 3 * HIDDEN, HIDDEN))
        sentinels = torch.empty(LAYERS, m, MIDDLE, device="cuda", dtype=torch.int16)
        flags = torch.zeros(LAYERS, 2, device="cuda", dtype=torch.int32)
        norm = {"norm": "rms", "norm_weight": self.gain} if fused else {}

        def step() -> None:
            if m == 1:
                sentinels.fill_(SENTINEL)
            middles = sentinels.view(BF16)
            for number, middle, (wqkv, wo, wgate, wdown) in zip(flags, middles, self.weights, strict=True):
                self.lib.call(wqkv, h, qkv, **norm, **tuning)
                self.lib.call(wo, qkv[:, :HIDDEN], o, **({"residual": h} if fused else {}), **tuning)
                signal = {"producer": number.data_ptr(), "producer_columns": SIGNALLED}
                self.lib.call(wgate, o, middle, activation="silu_gate", **signal, **norm, **tuning)
                signal = {"consumer": number.data_ptr(), "consumer_columns": SIGNALLED}
                last = {"residual": o} if fused else {"bias": self.bias}
                self.lib.call(wdown, middle, h, **signal, **last, **tuning)

        result = measure_replays(step)
        assert 0.1 < h.float().abs().mean() < 1e4  # nor NaN
        return result


def chain(name: str, asked: argparse.Namespace, limit: float, printed: Table) -> None:
    """A row for each library, tuning, number of tokens, and with and without norms and residuals inside."""
    made = Chain(Library(asked.libraries[0]), name)
    for folder, text, m, fused in itertools.product(asked.libraries, asked.tuning, asked.tokens, (False, True)):
        made.lib = Library(folder)
        taken = made.run(m, fused=fused, **json.loads(text))
        printed.add({
            "weights": name, "library": folder.name, "tuning": text, "M": m, "fused": "yes" if fused else "no",
            "chain, ms": taken.median * 1e3, "share of the read limit": made.bytes / taken.median / limit,
            "spread": taken.spread,
        })  # fmt: skip


def reason_of(name: str, y: Tensor, p: Packed, x: Tensor) -> str:
    """Why y is not the product; empty where it is."""
    if name == W8A8:
        return wrong_integers(y, integers(p, x, {}), True)
    if name == W8A8_FP8:
        return w8a8_fp8_checks.wrong(y, w8a8_fp8_checks.reference(p, x, {}))
    return wrong(y, p.dense, x, {})


def shape_time(lib: Library, name: str, n: int, k: int, m: int, **tuning: int) -> tuple[float, float, int]:
    """Seconds of a product as in a captured step, launches overlapping; with each waiting for the one before; bytes.

    Checked by the float rule, or for its integers or 8-bit floats, then timed with weights in rotation.
    """
    x, y = (torch.randn(m, columns, device="cuda", dtype=BF16) for columns in (k, n))
    first = pack(torch.randn(n, k, device="cuda") / k**0.5, name, dtype=BF16)
    lib.call(first, x, y, **tuning)
    if reason := reason_of(name, y, first, x):
        raise SystemExit(f"{name} {n} x {k} M={m}: {reason}")
    first.dense = None
    count = rotation(n, k, first.bytes * 8 / (n * k))
    packs = [first, *(pack(dense(n, k), name, dtype=BF16, dense=False) for _ in range(count - 1))]

    def work(**launch: int) -> None:
        for p in packs:
            lib.call(p, x, y, **(tuning | launch))

    together, waiting = (measure_replays(one).median for one in (work, lambda: work(dependent=-1)))
    return together / count, waiting / count, first.bytes


def peers(form: str, x: Tensor, n: int, k: int) -> Iterator[tuple[str, Calls, Tensor]]:
    """(name, a call a weight in rotation, the float64 weight of the first) of each peer of a format for x[M, K].

    `_int_mm` multiplies int8 activations too, and 32 rows of them: at least 17 are asked for.
    """
    from scripts.benchmarks.triton_gemv import TILES, rows_of

    count, scale = rotation(n, k, {"plain": 16, "int8": 8}.get(form, 4)), torch.rand(n, device="cuda") / (64 * k**0.5)
    if form == "plain":
        ws = [dense(n, k) for _ in range(count)]
        held = ws[0].double()
        yield "cuBLAS", [partial(functional.linear, x, w) for w in ws], held
        for tile in TILES if len(x) == 1 else ():
            yield f"Triton {tile}", [partial(rows_of, x, w, None, tile) for w in ws], held
    elif form == "int8":
        ws = [torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8) for _ in range(count)]
        rows, held = torch.randint(-127, 128, (32, k), device="cuda", dtype=torch.int8), ws[0].double() * scale[:, None]
        exact = (rows.double() @ ws[0].double().T).int()
        assert torch.equal(torch._int_mm(rows, ws[0].t()), exact)
        yield "_int_mm", [lambda w=w: torch._int_mm(rows, w.t())[: len(x)] for w in ws], Tensor()
        if len(x) == 1:
            torch.compiler.reset()
            options = {"max_autotune_pointwise": True, "coordinate_descent_tuning": False}
            made = torch.compile(lambda w: ((x * w).sum(-1) * scale)[None], dynamic=False, options=options)
            yield "torch.compile", [partial(made, w) for w in ws], held
            for tile in TILES:
                yield f"Triton {tile}", [partial(rows_of, x, w, scale, tile) for w in ws], held
    elif form.startswith("int4"):
        q = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(q, 8)
        pairs = [(packed.clone(), torch.rand(k // 128, n, 2, device="cuda").to(BF16) / 100) for _ in range(count)]
        codes = torch.stack([q >> 4, q & 15], -1).view(n, -1, 128).double() - 8
        factor, zero = pairs[0][1].double().transpose(0, 1)[..., None].unbind(2)
        calls: Calls = [partial(torch.ops.aten._weight_int4pack_mm, x, w, 128, s) for w, s in pairs]
        yield "tinygemm", calls, (codes * factor + zero).flatten(1)


def peer_times(form: str, n: int, k: int, m: int) -> Iterator[tuple[float, str]]:
    """(seconds, peer) of each that gives the product, within a relative RMSE of 1%."""
    x, label = torch.randn(m, k, device="cuda", dtype=BF16), form
    made = peers(form, x, n, k)
    while True:
        try:
            label, calls, weight = next(made)
            with torch.no_grad():
                due = reference(weight, x, {}, torch.float64) if weight.numel() else None
                if due is not None and not (calls[0]().double() - due).norm() <= 0.01 * due.norm():
                    raise ValueError("it computes something else")
                yield measure_replays(lambda calls=calls: [call() for call in calls]).median / len(calls), label
        except StopIteration:
            return
        except (RuntimeError, ImportError, AssertionError, ValueError, TypeError, AttributeError) as error:
            print(f"{label}: no time: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)


def shapes(name: str, asked: argparse.Namespace, limit: float, printed: Table) -> None:
    """A row for each shape and number of tokens, its peers below, and what came out for one token."""
    lib, ratios = Library(asked.libraries[0]), []
    for (_, n, k), m in itertools.product(LAYER + HEADS, asked.tokens):
        ours, waiting, size = shape_time(lib, name, n, k, m, **json.loads(asked.tuning[0]))
        torch.cuda.empty_cache()
        found = list(peer_times(name, n, k, m))
        time, best = min(found, default=(None, None))
        printed.add({
            "rows x K": f"{n} x {k}", "weights": name, "M": m, "ours, us": 1e6 * ours, "share": size / ours / limit,
            "waiting, us": 1e6 * waiting, "best peer": best, "its time, us": 1e6 * time if time else None,
            "ratio": time / ours if time else None, "ratio, waiting": time / waiting if time else None,
        })  # fmt: skip
        ratios += [(time / ours, time / waiting)] if time and m == 1 else []
        print("".join(f"    {seconds * 1e6:8.2f} us {peer}\n" for seconds, peer in found), end="", flush=True)
    for words, many in zip(("", ", each launch waiting for the one before"), zip(*ratios, strict=True), strict=False):
        mean = statistics.geometric_mean(many)
        print(f"{name}, one token{words}: ours over the best peer {min(many):.2f} at the least, mean {mean:.2f}")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, printed as it comes."""
    torch.manual_seed(0)
    limit = read_limit(asked.libraries[0])
    print(f"read limit {limit / 1e12:.3f} TB/s", flush=True)
    found: dict[str, Any] = {"read_limit": limit, "chain": [], "shapes": []}
    for name, (part, title) in itertools.product(
        asked.cases, {"chain": "32 layers of four products, median of 12 replays", "shapes": "each shape alone"}.items()
    ):
        if getattr(asked, part):
            printed = Table(title)
            {"chain": chain, "shapes": shapes}[part](name, asked, limit, printed)
            found[part] += printed.rows
            torch.cuda.empty_cache()
    return found
