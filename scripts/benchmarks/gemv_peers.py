"""What the HIP gemv kernels are measured against: torch, torchao where it is installed, and a plain Triton GEMV.

Every peer multiplies weights of its own, in rotation beyond the cache, and is checked before it is timed: against the
float64 product of the weight that it holds, or, where a library quantises, of the weight that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.bench.timing import measure_replays
from scripts.benchmarks.kernels import rotation
from tests.support.gemv_reference import reference

Call = Callable[[], Tensor]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Peer:
    """ways: by name (of a tile, say), one call a weight; the fastest counts.

    due: what the first weight's call gives, float64 [M, N]; bound: the relative RMSE that is allowed.
    """

    ways: dict[str, list[Call]]
    due: Tensor
    bound: float = 0.01


def _dense(n: int, k: int) -> list[Tensor]:
    return [torch.randn(n, k, device="cuda", dtype=BF16) / k**0.5 for _ in range(rotation(n, k, 16))]


def _int8(n: int, k: int) -> tuple[list[Tensor], Tensor]:
    """Weights in rotation and one scale a row for all of them."""
    weights = [torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8) for _ in range(rotation(n, k, 8))]
    return weights, torch.rand(n, device="cuda") / (64 * k**0.5)


def _gemm(x: Tensor, w: Tensor, scale: Tensor | None = None) -> Tensor:
    """In float64, of a weight with a scale a row or none."""
    return reference(w.double() if scale is None else w.double() * scale.double()[:, None], x, {}, torch.float64)


def cublas(x: Tensor, n: int, k: int) -> Peer:
    ws = _dense(n, k)
    return Peer({"": [partial(functional.linear, x, w) for w in ws]}, _gemm(x, ws[0]))


def torch_mv(x: Tensor, n: int, k: int) -> Peer:
    ws = _dense(n, k)
    return Peer({"": [partial(torch.mv, w, x[0]) for w in ws]}, _gemm(x, ws[0])[0])


def int_mm(x: Tensor, n: int, k: int) -> Peer:
    """Activations in int8 too, no scales, and 32 rows of them: at least 17 are asked for."""
    ws, _ = _int8(n, k)
    rows = torch.randint(-127, 128, (32, k), device="cuda", dtype=torch.int8)
    return Peer({"": [lambda w=w: torch._int_mm(rows, w.t()) for w in ws]}, _gemm(rows, ws[0]), 0.0)


def compiled(x: Tensor, n: int, k: int) -> Peer:
    """The product written as a sum, which torch.compile makes one Triton kernel of."""
    torch.compiler.reset()
    settings = {"max_autotune_pointwise": True, "coordinate_descent_tuning": False}
    call = torch.compile(lambda w, scale: (x * w).sum(-1) * scale, dynamic=False, options=settings)
    ws, scale = _int8(n, k)
    return Peer({"": [partial(call, w, scale) for w in ws]}, _gemm(x, ws[0], scale)[0])


def tinygemm(x: Tensor, n: int, k: int) -> Peer:
    q = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed, count = torch.ops.aten._convert_weight_to_int4pack(q, 8), rotation(n, k, 4)
    pairs = [(packed.clone(), torch.rand(k // 128, n, 2, device="cuda").to(BF16) / 100) for _ in range(count)]
    codes = torch.stack([q >> 4, q & 15], -1).view(n, -1, 128).double() - 8
    scale, zero = pairs[0][1].double().transpose(0, 1)[..., None].unbind(2)
    calls = [partial(torch.ops.aten._weight_int4pack_mm, x, w, 128, s) for w, s in pairs]
    return Peer({"": calls}, _gemm(x, (codes * scale + zero).flatten(1)))


def torchao(packing: str | None, x: Tensor, n: int, k: int) -> Peer:
    """int4 in a packing, or (None) int8 with the compiler, whose settings torchao's own configuration makes."""
    from torchao import quantization as ao

    options = ao.Int8WeightOnlyConfig(version=2) if packing is None else ao.Int4WeightOnlyConfig(
        group_size=128, int4_packing_format=packing, set_inductor_config=False
    )  # fmt: skip
    layers = [
        torch.nn.Linear(k, n, bias=False, device="cuda", dtype=BF16) for _ in range(rotation(n, k, 4 if packing else 8))
    ]
    for layer in layers:
        torch.nn.init.normal_(layer.weight)  # of size one: tile_packed_to_4d has no scale below bf16's epsilon
    dense = _gemm(x, layers[0].weight.detach())
    for layer in layers:
        ao.quantize_(layer, options)
    if packing is None:
        torch.compiler.reset()
    product = functional.linear if packing else torch.compile(functional.linear, dynamic=False)
    return Peer({"": [partial(product, x, layer.weight) for layer in layers]}, dense, 0.15 if packing else 0.02)


def by_triton(form: str, x: Tensor, n: int, k: int) -> Peer:
    """The plain Triton GEMV, by each of its tiles."""
    from scripts.benchmarks.triton_gemv import TILES, int4_meaning, int4_rows_of, rows_of

    if form == "plain":
        ws = _dense(n, k)
        return Peer({str(t): [partial(rows_of, x, w, None, t) for w in ws] for t in TILES}, _gemm(x, ws[0]))
    if form == "int8":
        ws, s = _int8(n, k)
        return Peer({str(t): [partial(rows_of, x, w, s, t) for w in ws] for t in TILES}, _gemm(x, ws[0], s))

    def one() -> tuple[Tensor, Tensor, Tensor | None]:
        q = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        scale, least = (torch.rand(n, k // 128, device="cuda").to(BF16) / 100 for _ in range(2))
        return q, scale, least if form.endswith("minimum") else None

    packs = [one() for _ in range(rotation(n, k, 4))]
    ways = {str(t): [partial(int4_rows_of, x, *pack, t) for pack in packs] for t in TILES}
    return Peer(ways, _gemm(x, int4_meaning(*packs[0])))


_INT4 = {
    "tinygemm": tinygemm, "torchao tile_packed_to_4d": partial(torchao, "tile_packed_to_4d"),
    "torchao plain": partial(torchao, "plain"),
}  # fmt: skip
#: by format, then by name; Triton's for each
PEERS: dict[str, dict[str, Callable[[Tensor, int, int], Peer]]] = {
    "plain": {"cuBLAS": cublas, "torch.mv": torch_mv},
    "int8": {"_int_mm": int_mm, "torch.compile": compiled, "torchao compiled": partial(torchao, None)},
    "int4_g128": _INT4, "int4_g128_minimum": _INT4,
}  # fmt: skip
LIBRARIES = ("torchao", "triton", "torch", "mslk-cuda")  # the last one is torchao's, for its packing "plain"
ONE_TOKEN = ("torch.mv", "torch.compile", "Triton", "torchao compiled")
#: what foreign code raises where it does not run on this machine or shape
FAILURES = (RuntimeError, ImportError, AssertionError, ValueError, TypeError, AttributeError)


def installed(library: str) -> str | None:
    """Its version."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def versions() -> str:
    """Of the libraries that the peers are from."""
    return ", ".join(f"{name} {installed(name) or 'not installed'}" for name in LIBRARIES)


def measure(peer: Peer) -> tuple[float, str]:
    """The fastest way's seconds a call and its name, each way checked first. Raises ValueError for a wrong product."""
    found = []
    for name, calls in peer.ways.items():
        error = float((calls[0]().double() - peer.due).norm() / peer.due.norm())
        if not error <= peer.bound:
            raise ValueError(f"{name} computes something else: relative RMSE {error:.3g} over {peer.bound}")
        taken = measure_replays(lambda calls=calls: [call() for call in calls]).median
        found.append((taken / len(calls), name))
    return min(found)


def times(form: str, n: int, k: int, m: int) -> Iterator[tuple[str, float, str]]:
    """(peer, seconds, its fastest way) of each peer that runs for weights [n, k] in this format and m tokens."""
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    peers = PEERS.get(form)
    for label, make in ({**peers, "Triton": partial(by_triton, form)} if peers else {}).items():
        library = next((name for name in LIBRARIES if label.lower().startswith(name)), "torch")
        if not installed(library) or (m > 1 and label in ONE_TOKEN):
            continue
        try:
            with torch.no_grad():
                yield label, *measure(make(x, n, k))
        except FAILURES as error:  # such a peer has no time
            print(f"{label}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)
        torch.cuda.empty_cache()
