"""Correctness of the HIP gemv kernels on the GPU that is here: float64 references, odd shapes, bits alike for every M.

python scripts/check_kernels.py --libraries DIR           # the folder that `accelpatch build` names
compute-sanitizer --tool memcheck python scripts/check_kernels.py --libraries DIR --small
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace
from pathlib import Path

import torch
from hip_gemv import FORMATS, Library, Packed, pack
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels import parity
from accelpatch.kernels.hip.binding import SENTINEL

SHAPES = [(48, 4096), (16, 11008), (100, 576), (33, 65), (1, 128), (7, 2048), (4096, 4096), (32, 6144)]
SHAPES += [(16, 16384), (16, 36864)]  # more than half a processor's memory even for one token
TOKENS = (1, 2, 7, 8, 9, 33)
# odd ends, every epilogue at N = 100, K in phases
SMALL = [(33, 65), (7, 200), (66, 200), (1, 128), (100, 576), (24, 6144), (80, 11008)]
SMALL_RUNS: tuple[tuple[int, dict[str, int]], ...] = (
    (8, {"blocks": 2}),  # two rounds of tiles, one behind the other or side by side
    (3, {"blocks": 3}),
    (1, {"blocks": 3, "shallow": 1}),
)


def reference(p: Packed, x: Tensor, kind: dict[str, object], dtype: torch.dtype) -> Tensor:
    """The product and its epilogue in plain torch, in ``dtype``."""
    assert p.dense is not None
    h = x.to(dtype)
    weight, bias = kind.get("norm_weight"), kind.get("norm_bias")
    if kind.get("norm") in ("rms", "rms_plus_one"):
        wide = h if dtype == torch.float64 else h.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        h = (wide.to(dtype) * (weight.to(dtype) + (kind["norm"] == "rms_plus_one"))).to(dtype)
    elif kind.get("norm") == "layer":
        h = functional.layer_norm(h, h.shape[-1:], weight.to(dtype), bias.to(dtype))
    y = functional.linear(h, p.dense.to(dtype), None if kind.get("bias") is None else kind["bias"].to(dtype))
    acts = {
        "silu": functional.silu,
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    }
    act = kind.get("activation", "none")
    if act == "silu_gate":
        gate, up = y.chunk(2, -1)
        y = functional.silu(gate) * up
    elif act != "none":
        y = acts[act](y)
    return y if kind.get("residual") is None else y + kind["residual"].to(dtype)


def wrong(y: Tensor, p: Packed, x: Tensor, kind: dict[str, object]) -> str:
    """Why y breaks the float rule; empty where it holds."""
    right, plain = reference(p, x, kind, torch.float64), reference(p, x, kind, x.dtype)
    return parity.compare(y, right, parity.torch_error(plain, right)).reason


def run(lib: Library, p: Packed, x: Tensor, kind: dict[str, object], **tuning: int) -> Tensor:
    columns = p.n // 2 if kind.get("activation") == "silu_gate" else p.n
    beyond = 3 + x.shape[0] % 2  # rows begin on a boundary of 4 bytes, and do not
    out = torch.full((x.shape[0], columns + beyond), float("nan"), dtype=x.dtype, device=x.device)
    lib.call(p, x, out[:, :columns], **kind, **tuning)
    assert out[:, columns:].isnan().all(), "wrote past its columns"
    return out[:, :columns]


def kinds(n: int, k: int, m: int, dtype: torch.dtype, device: str = "cuda") -> dict[str, dict[str, object]]:
    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    norm = {"norm_weight": 1 + 0.1 * r(k)}
    found: dict[str, dict[str, object]] = {
        "product": {},
        "bias": {"bias": r(n)},
        "residual": {"residual": r(m, n)},
        "odd_residual": {"residual": r(m, n + 1)[:, 1:]},  # no row of it on a boundary of 4 bytes but by chance
        "rms": {"norm": "rms", **norm},
        "rms_plus_one": {"norm": "rms_plus_one", **norm},
        "layer": {"norm": "layer", **norm, "norm_bias": r(k)},
        **{act: {"activation": act, "bias": r(n)} for act in ("relu", "gelu", "gelu_tanh", "silu")},
    }
    if n % 2 == 0:
        found["silu_gate"] = {"activation": "silu_gate", "bias": r(n), "norm": "rms", **norm}
    return found


def check_format(lib: Library, name: str, dtype: torch.dtype) -> list[str]:
    """Every shape, number of tokens and epilogue of one format; the failures in words."""
    bad, ran = [], 0
    for (n, k), interleaved in itertools.product(SHAPES, (False, True)):
        if (interleaved and n % 2) or (name not in ("plain",) and name.startswith("int4") and k % 2):
            continue
        w = torch.randn(n, k, device="cuda") / k**0.5
        p = pack(w, name, dtype=dtype, interleaved=interleaved)
        x = torch.randn(max(TOKENS), k + 8, dtype=dtype, device="cuda")[:, :k]
        for kind_name, kind in kinds(n, k, max(TOKENS), dtype).items():
            if (kind_name == "silu_gate") != interleaved or (
                kind_name not in ("product", "rms", "silu_gate") and n > 100
            ):
                continue
            whole = run(lib, p, x, kind)
            ran += 1
            if reason := wrong(whole, p, x, kind):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: {reason}")
            for m, tuning in itertools.product(TOKENS, ({}, {"shallow": 1, "blocks": 5}, {"dependent": -1})):
                part = {**kind, "residual": kind["residual"][:m]} if "residual" in kind else kind
                if not torch.equal(run(lib, p, x[:m], part, **tuning), whole[:m]):
                    bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: M={m} {tuning} has other bits")
    print(f"{name:18} {dtype!s:15} {ran:4} cases, {len(bad)} bad", flush=True)
    return bad


def check_signals(
    lib: Library, name: str, dtype: torch.dtype, device: str = "cuda", overlaps: bool = True
) -> list[str]:
    """A product that signals its columns to the next: the bits of a pair that waits, and no count left behind.

    Over and over, from sentinels, which are NaN, into NaN, so that what is read too early shows. On a CPU what is
    counted between the two is looked at, too; overlaps: whether anything is signalled there at all.
    """
    bad, columns = [], 4096 + 528 if device == "cpu" else 11008
    early, n = columns // 4096 * 4096, 80
    turns, tunings = (1, [{}]) if device == "cpu" else (200, [{}, {"dependent": -1}])
    for kind, m, tuning in itertools.product(("none", "silu_gate", "relu"), (1, 2, 3, 8), tunings):
        interleaved = kind == "silu_gate"
        before = pack(torch.randn(columns << interleaved, 128) / 128**0.5, name, dtype=dtype, interleaved=interleaved)
        behind = pack(torch.randn(n, columns) / columns**0.5, name, dtype=dtype)
        both = [moved(p, device) for p in (before, behind)]
        x = torch.randn(m, 128).to(device, dtype)
        results, flag = [], torch.zeros(2, dtype=torch.int32).to(device)
        for turn in range(1 + turns):
            between = torch.full((m, columns), SENTINEL, dtype=torch.int16).view(dtype).to(device)
            y = torch.full((m, n), float("nan"), dtype=dtype).to(device)
            producer = {"producer": flag.data_ptr(), "producer_columns": early} if turn else {}
            consumer = {"consumer": flag.data_ptr(), "consumer_columns": early} if turn else {}
            lib.call(both[0], x, between, activation=kind, **producer, **tuning)
            due = early if turn and overlaps else 0
            if device == "cpu" and flag.tolist() != [due, 0]:
                bad.append(f"{name} {dtype} M={m}, {kind}: {flag.tolist()} counted where {due} are due")
            lib.call(both[1], between, y, **consumer, **tuning)
            results.append(y.cpu())
        if not all(torch.equal(one, results[0]) for one in results) or results[0].isnan().any() or flag.any():
            bad.append(f"{name} {dtype} signals {early} columns, {kind}, M={m} {tuning}: {flag.tolist()}")
    return bad


def moved(p: Packed, device: str) -> Packed:
    return replace(p, **{key: t.to(device) for key in ("w", "scale", "offset") if (t := getattr(p, key)) is not None})


def check_small(lib: Library, name: str, dtype: torch.dtype, device: str = "cuda") -> list[str]:
    """A few shapes of one format, with no kernel on the GPU but ours: everything else happens on the CPU.

    So a sanitizer sees nothing else, and with torch's caching off every tensor ends where its allocation ends.
    """
    bad, ran = [], 0
    for (n, k), interleaved in itertools.product(SMALL, (False, True)):
        if (interleaved and n % 2) or (name.startswith("int4") and k % 2):
            continue
        weight = torch.randn(n, k) / k**0.5
        if name == "compact":  # outliers, also where infinities will be
            weight[::3, 4], weight[1::3, -3], weight[::5, k // 2] = 1e-9, -1e-9, 0.0
        p = pack(weight, name, dtype=dtype, interleaved=interleaved)
        packed = moved(p, device)
        for kind_name, kind in kinds(n, k, SMALL_RUNS[0][0], dtype, "cpu").items():
            if (kind_name == "silu_gate") != interleaved or (
                kind_name not in ("product", "rms", "silu_gate") and n != 100
            ):
                continue
            cut = 3 if ran % 2 else 8  # strided; after 3 no row is aligned but by chance, and other kernels run
            wide = torch.randn(SMALL_RUNS[0][0], k + cut, dtype=dtype)
            if kind_name == "product":
                wide[5, cut + 4] = wide[6, -3] = float("inf")  # takes a way of its own, where eight tokens run
            if dtype == torch.bfloat16:  # values this small: all of a row, and those of the last phase
                wide[0] *= 2.0**-120
                wide[4, cut + k * 3 // 4 :] *= 2.0**-120
            x = wide.to(device)[:, cut:]
            there = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in kind.items()}
            results = []
            for m, tuning in SMALL_RUNS:
                y = torch.full((m, n // 2 if interleaved else n), float("nan"), dtype=dtype).to(device)
                part = {**there, "residual": there["residual"][:m]} if "residual" in there else there
                lib.call(packed, x[:m], y, **part, **tuning)
                results.append(y.cpu())
            ran += len(results)
            if reason := wrong(results[0], p, wide[:, cut:], kind):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: {reason}")
            if any(not torch.equal(y.nan_to_num(7), results[0][: len(y)].nan_to_num(7)) for y in results[1:]):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: other bits alone than among others")
    print(f"{name:18} {dtype!s:15} {ran:4} launches, {len(bad)} bad", flush=True)
    return bad


def special(lib: Library) -> list[str]:
    """NaN and Inf, the subnormals of fp16, shifted pointers, no tokens, repeats."""
    bad = []
    for dtype in (torch.bfloat16, torch.float16):
        w = torch.randn(64, 1024, device="cuda") / 32
        for name in FORMATS:
            if (name, dtype) == ("compact", torch.float16):
                continue
            p = pack(w, name, dtype=dtype)
            x = torch.randn(8, 1024, dtype=dtype, device="cuda")
            x[1, 5], x[2, 7], x[3, 9] = float("nan"), float("inf"), float("-inf")
            x[4] *= 2.0**-24 if dtype == torch.float16 else 2.0**-120
            x[5] *= 2.0**6 if dtype == torch.float16 else 2.0**60
            x[7] *= torch.exp2(torch.randint(-20, 5, (1024,), device="cuda")).to(dtype)
            y = run(lib, p, x, {})
            parts = (
                (slice(0, 4), "NaN or Inf"),
                (slice(4, 5), "subnormals"),
                (slice(5, 6), "large values"),
                (slice(7, 8), "a wide range"),
            )
            for rows, what in parts:
                if reason := wrong(y[rows], p, x[rows], {}):
                    bad.append(f"{name} {dtype} {what}: {reason}")
            run(lib, p, x[:0], {})
            first = run(lib, p, x[5:], {})
            if any(not torch.equal(run(lib, p, x[5:], {}), first) for _ in range(1000)):
                bad.append(f"{name} {dtype}: repeats differ")
        shifted = torch.randn(33, 1024 * 64 + 1, device="cuda").to(dtype)[0, 1:].view(64, 1024)
        p = pack(w, "plain", dtype=dtype)
        p.w, p.dense = shifted, shifted.double()
        x = torch.randn(3, 1027, dtype=dtype, device="cuda")[:, 1:1025]
        if reason := wrong(run(lib, p, x, {}), p, x, {}):
            bad.append(f"{dtype} shifted pointers: {reason}")
    return bad


def odd_tokens(lib: Library) -> list[str]:
    """Values outside the usual range where K is staged whole (one token) and in phases (eight)."""
    bad = []
    for name in ("int8", "int4_g128", "fp8"):
        p = pack(torch.randn(4096, 12288, device="cuda") / 110, name, dtype=torch.bfloat16)
        x = torch.randn(8, 12288, dtype=torch.bfloat16, device="cuda")
        x[1] *= 2.0**60
        x[2] *= 2.0**-60
        x[3, 12000], x[4, 5] = 2.0**40, float("inf")
        x[5] = 0
        whole = run(lib, p, x, {"residual": x[:, :4096]})
        if reason := wrong(whole, p, x, {"residual": x[:, :4096]}):
            bad.append(f"{name} odd tokens: {reason}")
        for row in range(8):
            one = run(lib, p, x[row : row + 1], {"residual": x[row : row + 1, :4096]})
            if not torch.equal(one.nan_to_num(7), whole[row : row + 1].nan_to_num(7)):
                bad.append(f"{name} odd tokens: row {row} has other bits alone")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--small", action="store_true", help="few launches, none but of these kernels: for a sanitizer")
    options = parser.parse_args()
    if options.small:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at torch's first allocation
    torch.manual_seed(0)
    lib = Library(options.libraries)
    check = check_small if options.small else check_format
    every = itertools.product(options.formats, (torch.bfloat16, torch.float16))
    every = [one for one in every if one != ("compact", torch.float16)]
    bad = [line for name, dtype in every for line in check(lib, name, dtype)]
    if not options.small:
        bad += special(lib) + odd_tokens(lib)
        bad += [line for name in options.formats for line in check_signals(lib, name, torch.bfloat16)]
    print("\n".join(bad[:40]))
    print(f"{len(bad)} failures")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
