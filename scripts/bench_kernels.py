"""Times the HIP gemv kernels: the read limit, the 7B model's linear layers as one graph, each shape against its peers.

    python scripts/bench_kernels.py --libraries DIR [--formats plain int8 int4_g128] [--tuning '{"depth": 8}' ...]

Medians of graph replays; buffers rotate beyond L2. Run scripts/check_kernels.py first: no speed without correctness.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import gemv_peers
import torch
from check_kernels import wrong
from hip_gemv import Library, Packed, library_in, pack
from replay import rotation, seconds
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.hip.binding import SENTINEL

HIDDEN, MIDDLE, SIGNALLED = 4096, 11008, 8192  # SIGNALLED: columns of the MLP that `down` begins with
LAYER = (("qkv", 3 * HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN), ("gate_up", 2 * MIDDLE, HIDDEN), ("down", HIDDEN, MIDDLE))
HEADS = (("head", 32000, HIDDEN), ("head", 128256, HIDDEN))
LAYERS = 32


def read_limit(folder: Path) -> float:
    """Bytes a second of the best plain streaming read of 4 GiB."""
    library = ctypes.CDLL(str(library_in(folder, "read_limit")))
    library.accelpatch_read_all.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    buffer, sink = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda"), torch.zeros(4, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    best = 0.0
    for blocks in (processors * 2, processors * 4, processors * 16):
        time, _ = seconds(
            lambda blocks=blocks: library.accelpatch_read_all(
                buffer.data_ptr(), buffer.numel(), sink.data_ptr(), blocks, torch.cuda.current_stream().cuda_stream
            )
        )
        best = max(best, buffer.numel() / time)
    return best


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

    def run(self, m: int, *, fused: bool, **tuning: int) -> tuple[float, float]:
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

        result = seconds(step)
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

    return seconds(step)[0]


@dataclass(frozen=True)
class Own:
    """Seconds of one product: as in a captured step, launches overlapping, and with each waiting for the one before."""

    seconds: float
    alone: float
    bytes: int


def shape_time(lib: Library, name: str, n: int, k: int, m: int, **tuning: int) -> Own:
    """Checked by the float rule, then timed with weights in rotation."""
    x, y = (torch.randn(m, columns, device="cuda", dtype=torch.bfloat16) for columns in (k, n))
    first = pack(torch.randn(n, k, device="cuda") / k**0.5, name, dtype=torch.bfloat16)
    lib.call(first, x, y, **tuning)
    if reason := wrong(y, first, x, {}):
        raise SystemExit(f"{name} {n} x {k} M={m}: {reason}")
    first.dense = None
    count = rotation(n, k, first.bytes * 8 / (n * k))
    packs = [first, *(random_pack(n, k, name, False) for _ in range(count - 1))]

    def work(**launch: int) -> None:
        for p in packs:
            lib.call(p, x, y, **(tuning | launch))

    together, alone = seconds(work)[0], seconds(lambda: work(dependent=-1))[0]
    return Own(together / count, alone / count, first.bytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", type=Path, nargs="+", required=True)
    parser.add_argument("--formats", nargs="*", default=["plain", "int8", "int4_g128", "int4_g128_minimum"])
    parser.add_argument("--tuning", nargs="*", default=["{}"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--shapes", action="store_true", help="each shape alone too, beside its peers")
    parser.add_argument("--no-chain", action="store_true")
    return parser.parse_args()


def show_chain(name: str, options: argparse.Namespace, limit: float) -> None:
    """A line for each library and tuning."""
    chain = Chain(Library(options.libraries[0]), name)
    for folder in options.libraries:
        chain.lib = Library(folder)
        for text in options.tuning:
            line = []
            for m in options.tokens:
                for fused in (False, True):
                    time, spread = chain.run(m, fused=fused, **json.loads(text))
                    line.append(
                        f"M={m}{' fused' if fused else '':6} {time * 1e3:7.3f} ms "
                        f"{chain.bytes / time / limit:6.1%} (+-{spread / 2:4.1%})"
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


def main() -> None:
    options = parse()
    torch.manual_seed(0)
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


if __name__ == "__main__":
    main()
