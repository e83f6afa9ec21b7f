"""Times the HIP gemv kernels: the read limit, the 7B model's linear layers as one graph, each shape against its peers.

    python scripts/bench_kernels.py --libraries DIR [--formats plain int8 int4_g128] [--tuning '{"depth": 8}' ...]

Medians of graph replays; buffers rotate beyond L2. Run scripts/check_kernels.py first: no speed without correctness.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from hip_gemv import Library, Packed, library_in, pack
from torch import Tensor
from torch.nn import functional

HIDDEN, MIDDLE = 4096, 11008
LAYER = (("qkv", 3 * HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN), ("gate_up", 2 * MIDDLE, HIDDEN), ("down", HIDDEN, MIDDLE))
HEADS = (("head", 32000, HIDDEN), ("head", 128256, HIDDEN))
LAYERS = 32


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def seconds(work: Callable[[], object], repeats: int = 12) -> tuple[float, float]:
    """Median and spread (max - min over median) of a graph's replay."""
    graph = graph_of(work)
    times = []
    for i in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


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


def random_pack(n: int, k: int, name: str, paired: bool) -> Packed:
    return pack(
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5,
        name,
        dtype=torch.bfloat16,
        paired=paired,
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

        h, qkv, o, middle = buffer(HIDDEN), buffer(3 * HIDDEN), buffer(HIDDEN), buffer(MIDDLE)
        norm = {"norm": "rms", "norm_weight": self.gain} if fused else {}

        def step() -> None:
            for wqkv, wo, wgate, wdown in self.weights:
                self.lib.call(wqkv, h, qkv, **norm, **tuning)
                self.lib.call(wo, qkv[:, :HIDDEN], o, **({"residual": h} if fused else {}), **tuning)
                self.lib.call(wgate, o, middle, activation="silu_gate", **norm, **tuning)
                self.lib.call(wdown, middle, h, **({"residual": o} if fused else {"bias": self.bias}), **tuning)

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


def rotation(n: int, k: int, bits: float) -> int:
    return max(2, int(400e6 / (n * k * bits / 8)) + 1)


def shape_time(lib: Library, name: str, n: int, k: int, m: int, **tuning: int) -> tuple[float, int]:
    packs = [random_pack(n, k, name, False)]
    packs += [random_pack(n, k, name, False) for _ in range(rotation(n, k, packs[0].bytes * 8 / (n * k)) - 1)]
    x, y = (
        torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
        torch.empty(m, n, device="cuda", dtype=torch.bfloat16),
    )

    def work() -> None:
        for p in packs:
            lib.call(p, x, y, **tuning)

    return seconds(work)[0] / len(packs), packs[0].bytes


def peers_of(name: str, n: int, k: int, m: int) -> dict[str, list[Callable[[], object]]]:
    """What torch has for the format, each on weights of its own in rotation: cuBLAS; a compiled dequantising product
    and `_int_mm` (int8 activations, at least 17 rows); tinygemm's int4."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    if name == "plain":
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(rotation(n, k, 16))]
        return {"cuBLAS": [lambda w=w: functional.linear(x, w) for w in dense]}
    if name == "int8":
        count, rows = rotation(n, k, 8), torch.randint(-127, 127, (32, k), device="cuda", dtype=torch.int8)
        ws = [torch.randint(-127, 127, (n, k), device="cuda", dtype=torch.int8) for _ in range(count)]
        scale = torch.rand(n, device="cuda").bfloat16()
        product = torch.compile(lambda x, w, s: functional.linear(x, w.to(x.dtype)) * s)
        return {
            "compiled": [lambda w=w: product(x, w, scale) for w in ws],
            "_int_mm": [lambda w=w: torch._int_mm(rows, w.t()) for w in ws],
        }
    if not name.startswith("int4"):
        return {}
    count, q = rotation(n, k, 4), torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(q, 8)
    pairs = [(packed.clone(), torch.rand(k // 128, n, 2, device="cuda").bfloat16()) for _ in range(count)]
    return {"tinygemm": [lambda w=w, s=s: torch.ops.aten._weight_int4pack_mm(x, w, 128, s) for w, s in pairs]}


def peer_times(name: str, n: int, k: int, m: int) -> dict[str, float]:
    found = {}
    for peer, calls in peers_of(name, n, k, m).items():
        try:
            found[peer] = seconds(lambda calls=calls: [call() for call in calls])[0] / len(calls)
        except RuntimeError as error:  # a peer that does not take this shape has no time
            print(f"{peer}: {str(error).splitlines()[0]}", flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", type=Path, nargs="+", required=True)
    parser.add_argument("--formats", nargs="*", default=["plain", "int8", "int4_g128", "int4_g128_minimum"])
    parser.add_argument("--tuning", nargs="*", default=["{}"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--shapes", action="store_true")
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
    """A line for each shape and number of tokens, beside its peers."""
    for which, n, k in LAYER + HEADS:
        for m in options.tokens:
            ours, read = shape_time(Library(options.libraries[0]), name, n, k, m, **json.loads(options.tuning[0]))
            beside = "  ".join(
                f"{peer} {time * 1e6:7.2f} us x{time / ours:.2f}" for peer, time in peer_times(name, n, k, m).items()
            )
            line = f"shape {name:10} {which:8} {n:6} x {k:5} M={m} ours {ours * 1e6:7.2f} us {read / ours / limit:6.1%}"
            print(f"{line}  {beside}", flush=True)
            torch.cuda.empty_cache()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    limit = read_limit(options.libraries[0])
    print(f"{torch.cuda.get_device_name()}: read limit {limit / 1e12:.3f} TB/s", flush=True)
    for name in options.formats:
        show_chain(name, options, limit)
        torch.cuda.empty_cache()
        if options.shapes:
            show_shapes(name, options, limit)
    if "plain" in options.formats and options.shapes:
        times = "  ".join(f"M={m} {torch_chain(m) * 1e3:.3f} ms" for m in options.tokens)
        print(f"chain torch bf16 {times}", flush=True)


if __name__ == "__main__":
    main()
