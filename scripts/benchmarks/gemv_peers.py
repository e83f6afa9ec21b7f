"""What the HIP gemv kernels are measured against: torch, torchao where it is installed, and a plain Triton GEMV.

Every peer multiplies weights of its own, in rotation beyond the cache, and is checked before it is timed: against the
float64 product of the weight that it holds, or, where a library quantises, of the weight that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.bench.timing import measure_replays
from benchmarks.layer_shapes import rotation
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


def _one_way(calls: list[Call], due: Tensor, bound: float = 0.01) -> Peer:
    return Peer({"": calls}, due, bound)


def _dense(n: int, k: int, count: int) -> list[Tensor]:
    return [torch.randn(n, k, device="cuda", dtype=BF16) / k**0.5 for _ in range(count)]


def _int8(n: int, k: int) -> tuple[list[Tensor], Tensor]:
    """Weights in rotation and one scale a row for all of them."""
    weights = [torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8) for _ in range(rotation(n, k, 8))]
    return weights, torch.rand(n, device="cuda") / (64 * k**0.5)


def _gemm(x: Tensor, w: Tensor, scale: Tensor | None = None) -> Tensor:
    """In float64, of a weight with a scale a row or none."""
    return reference(w.double() if scale is None else w.double() * scale.double()[:, None], x, {}, torch.float64)


def cublas(x: Tensor, n: int, k: int) -> Peer:
    ws = _dense(n, k, rotation(n, k, 16))
    return _one_way([lambda w=w: functional.linear(x, w) for w in ws], _gemm(x, ws[0]))


def torch_mv(x: Tensor, n: int, k: int) -> Peer:
    ws = _dense(n, k, rotation(n, k, 16))
    return _one_way([lambda w=w: torch.mv(w, x[0]) for w in ws], _gemm(x, ws[0])[0])


def int_mm(x: Tensor, n: int, k: int) -> Peer:
    """Activations in int8 too, no scales, and 32 rows of them: at least 17 are asked for."""
    ws, _ = _int8(n, k)
    rows = torch.randint(-127, 128, (32, k), device="cuda", dtype=torch.int8)
    return _one_way([lambda w=w: torch._int_mm(rows, w.t()) for w in ws], _gemm(rows, ws[0]), 0.0)


def compiled(x: Tensor, n: int, k: int) -> Peer:
    """The product written as a sum, which torch.compile makes one Triton kernel of."""
    torch.compiler.reset()
    settings = {"max_autotune_pointwise": True, "coordinate_descent_tuning": False}
    call = torch.compile(lambda w, scale: (x * w).sum(-1) * scale, dynamic=False, options=settings)
    ws, scale = _int8(n, k)
    return _one_way([lambda w=w: call(w, scale) for w in ws], _gemm(x, ws[0], scale)[0])


def tinygemm(x: Tensor, n: int, k: int) -> Peer:
    q = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed, count = torch.ops.aten._convert_weight_to_int4pack(q, 8), rotation(n, k, 4)
    pairs = [(packed.clone(), torch.rand(k // 128, n, 2, device="cuda").to(BF16) / 100) for _ in range(count)]
    codes = torch.stack([q >> 4, q & 15], -1).view(n, -1, 128).double() - 8
    scale, zero = pairs[0][1].double().transpose(0, 1)[..., None].unbind(2)
    product = torch.ops.aten._weight_int4pack_mm
    return _one_way(
        [lambda w=w, s=s: product(x, w, 128, s) for w, s in pairs], _gemm(x, (codes * scale + zero).flatten(1))
    )


def _torchao(x: Tensor, n: int, k: int, bits: int, options: object, bound: float, *, by_compiler: bool) -> Peer:
    from torchao.quantization import quantize_

    weights, dense = [], None
    for _ in range(rotation(n, k, bits)):
        layer = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=BF16)
        torch.nn.init.normal_(layer.weight)  # of size one: tile_packed_to_4d has no scale below bf16's epsilon
        dense = _gemm(x, layer.weight.detach()) if dense is None else dense
        quantize_(layer, options)
        weights.append(layer.weight)
    if by_compiler:
        torch.compiler.reset()
    product = torch.compile(functional.linear, dynamic=False) if by_compiler else functional.linear
    assert dense is not None
    return _one_way([lambda w=w: product(x, w) for w in weights], dense, bound)


def torchao_int8(x: Tensor, n: int, k: int) -> Peer:
    """With the compiler, and its settings as torchao's own configuration makes them."""
    from torchao.quantization import Int8WeightOnlyConfig

    return _torchao(x, n, k, 8, Int8WeightOnlyConfig(version=2), 0.02, by_compiler=True)


def torchao_int4(packing: str) -> Callable[[Tensor, int, int], Peer]:
    def make(x: Tensor, n: int, k: int) -> Peer:
        from torchao.quantization import Int4WeightOnlyConfig

        options = Int4WeightOnlyConfig(group_size=128, int4_packing_format=packing, set_inductor_config=False)
        return _torchao(x, n, k, 4, options, 0.15, by_compiler=False)

    return make


def triton_dense(x: Tensor, n: int, k: int) -> Peer:
    from benchmarks.triton_gemv import TILES, rows_of

    ws = _dense(n, k, rotation(n, k, 16))
    return Peer({str(t): [lambda w=w, t=t: rows_of(x, w, None, t) for w in ws] for t in TILES}, _gemm(x, ws[0]))


def triton_int8(x: Tensor, n: int, k: int) -> Peer:
    from benchmarks.triton_gemv import TILES, rows_of

    ws, s = _int8(n, k)
    return Peer({str(t): [lambda w=w, t=t: rows_of(x, w, s, t) for w in ws] for t in TILES}, _gemm(x, ws[0], s))


def triton_int4(*, minimum: bool) -> Callable[[Tensor, int, int], Peer]:
    def make(x: Tensor, n: int, k: int) -> Peer:
        from benchmarks.triton_gemv import TILES, int4_meaning, int4_rows_of

        def one() -> tuple[Tensor, Tensor, Tensor | None]:
            q = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
            beside = [torch.rand(n, k // 128, device="cuda").to(BF16) / 100 for _ in range(2)]
            return q, beside[0], beside[1] if minimum else None

        ws = [one() for _ in range(rotation(n, k, 4))]
        ways = {str(t): [lambda w=w, t=t: int4_rows_of(x, *w, t) for w in ws] for t in TILES}
        return Peer(ways, _gemm(x, int4_meaning(*ws[0])))

    return make


_INT4 = {
    "tinygemm": tinygemm,
    "torchao tile_packed_to_4d": torchao_int4("tile_packed_to_4d"),
    "torchao plain": torchao_int4("plain"),
}
#: by format, then by name
PEERS: dict[str, dict[str, Callable[[Tensor, int, int], Peer]]] = {
    "plain": {"cuBLAS": cublas, "torch.mv": torch_mv, "Triton": triton_dense},
    "int8": {"_int_mm": int_mm, "torch.compile": compiled, "Triton": triton_int8, "torchao compiled": torchao_int8},
    "int4_g128": {**_INT4, "Triton": triton_int4(minimum=False)},
    "int4_g128_minimum": {**_INT4, "Triton": triton_int4(minimum=True)},
}
LIBRARIES = ("torchao", "triton", "torch", "mslk-cuda")  # the last one is torchao's, for its packing "plain"
ONE_TOKEN = ("torch.mv", "torch.compile", "Triton", "torchao compiled")
#: what foreign code raises where it does not run on this machine or shape
FAILURES = (RuntimeError, ImportError, AssertionError, ValueError, TypeError, AttributeError)


@cache
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
    for label, make in PEERS.get(form, {}).items():
        library = next((name for name in LIBRARIES if label.lower().startswith(name)), "torch")
        if not installed(library) or (m > 1 and label in ONE_TOKEN):
            continue
        try:
            with torch.no_grad():
                yield label, *measure(make(x, n, k))
        except FAILURES as error:  # such a peer has no time
            print(f"{label}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)
        torch.cuda.empty_cache()
