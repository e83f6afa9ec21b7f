"""Times the HIP gemv kernels: the read limit, a 7B model's linear layers as one graph, each shape beside its peers."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.bench.read_limit import stream_reads
from accelpatch.bench.timing import Timing, measure_replays
from accelpatch.kernels.hip.binding import SENTINEL
from benchmarks import gemv_peers
from benchmarks.layer_shapes import HEADS, HIDDEN, LAYER, MIDDLE, rotation
from tests.support import w8a8_fp8_checks
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import W8A8, W8A8_FP8, Library, Packed, library_in, pack
from tests.support.w8a8_checks import reference
from tests.support.w8a8_checks import wrong as wrong_integers

SIGNALLED = 8192  # columns of the MLP that `down` begins with
LAYERS = 32


def read_limit(folder: Path) -> float:
    """Bytes a second of the best plain streaming read of 4 GiB."""
    library = ctypes.CDLL(str(library_in(folder, "read_limit")))
    buffer = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")
    times = [
        measure_replays(lambda read=read: read(torch.cuda.current_stream().cuda_stream)).median
        for read in stream_reads(library, buffer)
    ]
    return buffer.nbytes / min(times)


def random_pack(n: int, k: int, name: str, interleaved: bool) -> Packed:
    return pack(
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5,
        name,
        dtype=torch.bfloat16,
        interleaved=interleaved,
        dense=False,
    )


class Chain:
    """32 layers of the four products, each reading what the one before wrote; fused: norms and residuals inside.

    Without norms a bias on the last product keeps values at an ordinary size: they would end at zero or overflow.
    """

    def __init__(self, lib: Library, name: str) -> None:
        self.lib = lib
        self.weights = [[random_pack(n, k, name, which == "gate_up") for which, n, k in LAYER] for _ in range(LAYERS)]
        self.gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.bias = torch.randn(HIDDEN, device="cuda", dtype=torch.bfloat16) / 2
        self.bytes = sum(p.bytes for layer in self.weights for p in layer)

    def run(self, m: int, *, fused: bool, **tuning: int) -> Timing:
        def buffer(columns: int) -> Tensor:
            return torch.randn(m, columns, device="cuda", dtype=torch.bfloat16)

        h, qkv, o = buffer(HIDDEN), buffer(3 * HIDDEN), buffer(HIDDEN)
        sentinels = torch.empty(LAYERS, m, MIDDLE, device="cuda", dtype=torch.int16)
        flags = torch.zeros(LAYERS, 2, device="cuda", dtype=torch.int32)
        norm = {"norm": "rms", "norm_weight": self.gain} if fused else {}

        def step() -> None:
            if m == 1:
                sentinels.fill_(SENTINEL)
            middles = sentinels.view(torch.bfloat16)
            for number, middle, (wqkv, wo, wgate, wdown) in zip(flags, middles, self.weights, strict=True):
                self.lib.call(wqkv, h, qkv, **norm, **tuning)
                self.lib.call(wo, qkv[:, :HIDDEN], o, **({"residual": h} if fused else {}), **tuning)
                self.lib.call(
                    wgate,
                    o,
                    middle,
                    activation="silu_gate",
                    producer=number.data_ptr(),
                    producer_columns=SIGNALLED,
                    **norm,
                    **tuning,
                )
                self.lib.call(
                    wdown,
                    middle,
                    h,
                    consumer=number.data_ptr(),
                    consumer_columns=SIGNALLED,
                    **({"residual": o} if fused else {"bias": self.bias}),
                    **tuning,
                )

        result = measure_replays(step)
        assert 0.1 < h.float().abs().mean() < 1e4  # nor NaN
        return result


def torch_chain(m: int) -> float:
    """The same products by torch in bf16 (cuBLAS), SiLU gate left out: its least."""
    weights = [
        [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _, n, k in LAYER] for _ in range(LAYERS)
    ]
    x = torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for wqkv, wo, wgate, wdown in weights:
            h = functional.linear(x, wqkv)
            h = functional.linear(h[:, :HIDDEN], wo)
            h = functional.linear(h, wgate)
            functional.linear(h[:, :MIDDLE], wdown)

    return measure_replays(step).median


@dataclass(frozen=True)
class Own:
    """Seconds of one product: as in a captured step, launches overlapping, and with each waiting for the one before."""

    seconds: float
    alone: float
    bytes: int


def reason_of(name: str, y: Tensor, p: Packed, x: Tensor) -> str:
    """Why y is not the product; empty where it is."""
    if name == W8A8:
        return wrong_integers(y, reference(p, x, {}), True)
    if name == W8A8_FP8:
        return w8a8_fp8_checks.wrong(y, w8a8_fp8_checks.reference(p, x, {}))
    return wrong(y, p.dense, x, {})


def shape_time(lib: Library, name: str, n: int, k: int, m: int, **tuning: int) -> Own:
    """Checked by the float rule, or for its integers or 8-bit floats, then timed with weights in rotation."""
    x, y = (torch.randn(m, columns, device="cuda", dtype=torch.bfloat16) for columns in (k, n))
    first = pack(torch.randn(n, k, device="cuda") / k**0.5, name, dtype=torch.bfloat16)
    lib.call(first, x, y, **tuning)
    if reason := reason_of(name, y, first, x):
        raise SystemExit(f"{name} {n} x {k} M={m}: {reason}")
    first.dense = None
    count = rotation(n, k, first.bytes * 8 / (n * k))
    packs = [first, *(random_pack(n, k, name, False) for _ in range(count - 1))]

    def work(**launch: int) -> None:
        for p in packs:
            lib.call(p, x, y, **(tuning | launch))

    together, alone = (measure_replays(one).median for one in (work, lambda: work(dependent=-1)))
    return Own(together / count, alone / count, first.bytes)


def show_chain(name: str, options: argparse.Namespace, limit: float) -> None:
    """A line for each library and tuning."""
    chain = Chain(Library(options.libraries[0]), name)
    for folder in options.libraries:
        chain.lib = Library(folder)
        for text in options.tuning:
            line = []
            for m in options.tokens:
                for fused in (False, True):
                    taken = chain.run(m, fused=fused, **json.loads(text))
                    line.append(
                        f"M={m}{' fused' if fused else '':6} {taken.median * 1e3:7.3f} ms "
                        f"{chain.bytes / taken.median / limit:6.1%} (+-{taken.spread / 2:4.1%})"
                    )
            print(f"chain {name:10} {folder.name:8} {text:40} " + "  ".join(line), flush=True)


def show_shapes(name: str, options: argparse.Namespace, limit: float) -> None:
    """A line for each shape and number of tokens, its peers below, and what came out for one token."""
    lib, ratios = Library(options.libraries[0]), []
    for (which, n, k), m in itertools.product(LAYER + HEADS, options.tokens):
        own = shape_time(lib, name, n, k, m, **json.loads(options.tuning[0]))
        torch.cuda.empty_cache()
        line = f"shape {name:10} {which:8} {n:6} x {k:5} M={m} ours {own.seconds * 1e6:7.2f} us"
        line += f" {own.bytes / own.seconds / limit:6.1%} (alone {own.alone * 1e6:7.2f} us)"
        peers = list(gemv_peers.times(name, n, k, m))
        if peers:
            best, time, _ = min(peers, key=lambda peer: peer[1])
            line += f"  over the best peer x{time / own.seconds:.2f} (alone x{time / own.alone:.2f}): {best}"
            ratios += [(time / own.seconds, time / own.alone)] if m == 1 else []
        print(line, *(f"    {time * 1e6:8.2f} us {peer} {way}" for peer, time, way in peers), sep="\n", flush=True)
    for i, words in enumerate(("", ", each launch waiting for the one before") if ratios else ()):
        found = [pair[i] for pair in ratios]
        mean = statistics.geometric_mean(found)
        print(f"{name}, one token{words}: ours over the best peer {min(found):.2f} at the least, mean {mean:.2f}")


def show(options: argparse.Namespace) -> None:
    """Everything that was asked for, printed as it comes."""
    limit = read_limit(options.libraries[0])
    print(f"{torch.cuda.get_device_name()}: read limit {limit / 1e12:.3f} TB/s", flush=True)
    if options.shapes:
        print(f"peers from {gemv_peers.versions()}", flush=True)
    for name in options.formats:
        if not options.no_chain:
            show_chain(name, options, limit)
            torch.cuda.empty_cache()
        if options.shapes:
            show_shapes(name, options, limit)
    if "plain" in options.formats and options.shapes and not options.no_chain:
        times = "  ".join(f"M={m} {torch_chain(m) * 1e3:.3f} ms" for m in options.tokens)
        print(f"chain torch bf16 {times}", flush=True)
