"""Checks of the HIP gemv kernels that run on a GPU, and through the emulator on a CPU: few launches each."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from accelpatch.kernels.hip.binding import SENTINEL
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import Library, Packed, pack

# odd ends, every epilogue at N = 100, K in several tiles
SMALL = [(33, 65), (7, 200), (66, 200), (1, 128), (100, 576), (24, 6144), (80, 11008)]
SMALL_RUNS: tuple[tuple[int, dict[str, int]], ...] = (
    (8, {"blocks": 2}),  # two rounds of tiles, one behind the other or side by side
    (3, {"blocks": 3}),
    (1, {"blocks": 3, "shallow": 1}),
)


def run(lib: Library, p: Packed, x: Tensor, kind: dict[str, object], **tuning: int) -> Tensor:
    """y[M, N] of one launch, which may write nothing beside it."""
    columns = p.n // 2 if kind.get("activation") == "silu_gate" else p.n
    beyond = 3 + x.shape[0] % 2  # rows begin on a boundary of 4 bytes, and do not
    out = torch.full((x.shape[0], columns + beyond), float("nan"), dtype=x.dtype, device=x.device)
    lib.call(p, x, out[:, :columns], **kind, **tuning)
    assert out[:, columns:].isnan().all(), "wrote past its columns"
    return out[:, :columns]


def kinds(n: int, k: int, m: int, dtype: torch.dtype, device: str = "cuda") -> dict[str, dict[str, object]]:
    """By name, what stands before and after a product of x[m, k] and w[n, k]: the arguments of a launch."""

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


EVERY_SIZE = ("product", "rms", "silu_gate")


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
        packed = p.to(device)
        for kind_name, kind in kinds(n, k, SMALL_RUNS[0][0], dtype, "cpu").items():
            if (kind_name == "silu_gate") != interleaved or (kind_name not in EVERY_SIZE and n != 100):
                continue
            cut = 3 if ran % 2 else 8  # strided; after 3 no row is aligned but by chance, and other kernels run
            wide = torch.randn(SMALL_RUNS[0][0], k + cut, dtype=dtype)
            if kind_name == "product":
                wide[5, cut + 4] = wide[6, -3] = float("inf")  # takes a way of its own, where eight tokens run
            if dtype == torch.bfloat16:  # values this small: all of a row, and those of the last tile
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
            if reason := wrong(results[0], p.dense, wide[:, cut:], kind):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: {reason}")
            if any(not torch.equal(y.nan_to_num(7), results[0][: len(y)].nan_to_num(7)) for y in results[1:]):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: other bits alone than among others")
    print(f"{name:18} {dtype!s:15} {ran:4} launches, {len(bad)} bad", flush=True)
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
    repeats, tunings = (1, [{}]) if device == "cpu" else (200, [{}, {"dependent": -1}])
    for kind, m, tuning in itertools.product(("none", "silu_gate", "relu"), (1, 2, 3, 8), tunings):
        interleaved = kind == "silu_gate"
        before = pack(torch.randn(columns << interleaved, 128) / 128**0.5, name, dtype=dtype, interleaved=interleaved)
        behind = pack(torch.randn(n, columns) / columns**0.5, name, dtype=dtype)
        both = [p.to(device) for p in (before, behind)]
        x = torch.randn(m, 128).to(device, dtype)
        results, flag = [], torch.zeros(2, dtype=torch.int32).to(device)
        for repeat in range(1 + repeats):
            between = torch.full((m, columns), SENTINEL, dtype=torch.int16).view(dtype).to(device)
            y = torch.full((m, n), float("nan"), dtype=dtype).to(device)
            producer = {"producer": flag.data_ptr(), "producer_columns": early} if repeat else {}
            consumer = {"consumer": flag.data_ptr(), "consumer_columns": early} if repeat else {}
            lib.call(both[0], x, between, activation=kind, **producer, **tuning)
            due = early if repeat and overlaps else 0
            if device == "cpu" and flag.tolist() != [due, 0]:
                bad.append(f"{name} {dtype} M={m}, {kind}: {flag.tolist()} counted where {due} are due")
            lib.call(both[1], between, y, **consumer, **tuning)
            results.append(y.cpu())
        if not all(torch.equal(one, results[0]) for one in results) or results[0].isnan().any() or flag.any():
            bad.append(f"{name} {dtype} signals {early} columns, {kind}, M={m} {tuning}: {flag.tolist()}")
    return bad
