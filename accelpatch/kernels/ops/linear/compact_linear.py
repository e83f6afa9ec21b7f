"""Linear layer with a lossless 12-bit bf16 weight: y[M, N] = x[M, K] @ w[N, K]^T + bias[N].

The tiles (compact_tiles.py) are the only copy of the weight that a module on a GPU holds. They hold the weight bit for
bit: the reference unpacks them and runs torch's own linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.compiling import libraries as building
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts import compact_tiles
from accelpatch.kernels.layouts.compact_tiles import FOUR, STEP, STEP_BYTES, CompactTiles
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.layouts.tiled import in_order, in_tiles
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, float_linear, gradient
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec

OP = "compact_linear"
BLOCK = 100 << 20  # values unpacked at once: 200 MiB of bfloat16, gate and up of a 7B model
CHECKED = 1 << 24  # values unpacked at once in torch, which needs some 30 bytes for each


def dense(dtype: torch.dtype, *args: Any) -> tuple[Tensor, Tensor | None]:
    """The unpacked weight and the bias in `dtype`."""
    *tiles, bias = args
    return CompactTiles(*tiles).unpack().to(dtype), None if bias is None else bias.to(dtype)


def reference(x: Tensor, *args: Any) -> Tensor:
    """Unpack the weight, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *args))


def blocks(*args: Any) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    *rest, bias = args
    tiles = CompactTiles(*rest).alone()
    step = max(1, CHECKED // (TILE_ROWS * tiles.k))
    for start in range(0, tiles.w.shape[0], step):
        part, row = _slice(tiles, start, start + step), start * TILE_ROWS
        rows = slice(row, row + part.n)
        yield rows, partial(dense, torch.float64, *part, None if bias is None else bias[rows])


def spec(x: Tensor, *args: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    *rest, bias = args
    tiles = CompactTiles(*rest)
    n, k = tiles.n, tiles.k
    require(x.dim() >= 1 and x.dtype in FLOATS, OP, f"x is float [..., K], not {say(x)}")
    require(x.shape[-1] == k, OP, f"x has {x.shape[-1]} features, the weight {k}")
    padded = -(-tiles.rows // TILE_ROWS)
    size = [padded, -(-k // STEP), STEP_BYTES]
    require(list(tiles.w.shape) == size, OP, f"the tiles of [{tiles.rows}, {k}] are {size}, not {say(tiles.w)}")
    interleaved = tiles.part == "all" or tiles.rows % (2 * TILE_ROWS) == 0
    require(interleaved, OP, f"interleaved tiles hold a multiple of {2 * TILE_ROWS} rows, not {tiles.rows}")
    fits = list(tiles.scale.shape) == [padded, TILE_ROWS] and tiles.scale.dtype == torch.float32
    require(fits, OP, f"scale is float32 {[padded, TILE_ROWS]}, not {say(tiles.scale)}")
    outliers = tiles.outliers
    fits = outliers.dtype == torch.int32 and outliers.dim() == 3 and list(outliers.shape[:2]) == [padded, TILE_ROWS]
    require(fits and outliers.shape[2] % FOUR == 0 < outliers.shape[2], OP, f"outliers are int32, not {say(outliers)}")
    common.check_bias(OP, x, n, bias, w=tiles.w, scale=tiles.scale, outliers=outliers)
    return of_shape(n, k, x.dtype, m=x.numel() // k)


def of_shape(n: int, k: int, dtype: torch.dtype, *, m: int = 1) -> Spec:
    """The Spec of a linear layer of this size, for planning before there are tiles."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    reason = compact_tiles.unfit(spec.sizes["K"], spec.dtype) or binding.why_not(spec, device, "gemv_compact")
    return reason or common.too_many_rows(spec, binding.MAX_ROWS)


def libraries(dtype: torch.dtype) -> tuple[str, ...]:
    """The device libraries that `by_hip` and `by_hip_unpack` launch."""
    return (binding.library_name("gemv_compact", dtype),)


def by_hip(x: Tensor, *args: Any) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x.

    A gate or up in interleaved tiles computes the other's columns too, and drops them.
    """
    *rest, bias = args
    tiles = CompactTiles(*rest)
    y = binding.launch(tiles.launch(), x, bias=in_tiles(bias, tiles.part))
    return in_order(y, tiles.part)


def unpack_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip_unpack` cannot run a spec; None where it can."""
    return building.why_not("gemv_compact", device)


def by_hip_unpack(x: Tensor, *args: Any) -> Tensor:
    """The implementation `hip_unpack`: the device library unpacks the weight (a large one in slices) for torch's
    GEMM."""
    return _by_gemm(x, args, unpacked)


def by_torch(x: Tensor, *args: Any) -> Tensor:
    """The implementation `torch`: unpacks the weight (a large one in slices), then torch's GEMM."""
    return _by_gemm(x, args, CompactTiles.unpack)


def _by_gemm(x: Tensor, args: tuple[Any, ...], unpack: Callable[[CompactTiles], Tensor]) -> Tensor:
    *rest, bias = args
    tiles = CompactTiles(*rest)
    flat, tile_count = x.reshape(-1, tiles.k), tiles.w.shape[0]
    slices = -(-tile_count * TILE_ROWS * tiles.k // BLOCK)
    if slices == 1:
        y = functional.linear(flat, unpack(tiles).to(x.dtype), None if bias is None else bias.to(x.dtype))
        return y.view(*x.shape[:-1], tiles.n)
    halves = 1 if tiles.part == "all" else 2  # halves of the rows; in order within each
    each, bias_halves = TILE_ROWS // halves, in_halves(bias, tiles)
    y = x.new_empty((flat.shape[0], halves, tiles.rows // halves))
    step = -(-tile_count // slices)
    for start in range(0, tile_count, step):
        part = unpack(_slice(tiles, start, start + step)).to(x.dtype)
        columns = slice(start * each, start * each + part.shape[0] // halves)
        added = None if bias_halves is None else bias_halves[:, columns].flatten().to(x.dtype)
        y[:, :, columns] = functional.linear(flat, part, added).view(-1, halves, part.shape[0] // halves)
    kept = {"gate": y[:, 0], "up": y[:, -1]}.get(tiles.part, y)
    return kept.contiguous().view(*x.shape[:-1], tiles.n)


def in_halves(bias: Tensor | None, tiles: CompactTiles) -> Tensor | None:
    """The bias as [halves, rows per half]; zero for the half that belongs to another weight."""
    if bias is None or tiles.part in ("all", "both"):
        return None if bias is None else bias.view(1 if tiles.part == "all" else 2, -1)
    both = (bias, torch.zeros_like(bias))
    return torch.stack(both if tiles.part == "gate" else both[::-1])


def _slice(tiles: CompactTiles, start: int, stop: int) -> CompactTiles:
    """The tiles start .. stop - 1, with all rows in them."""
    rows = min(stop * TILE_ROWS, tiles.rows) - start * TILE_ROWS
    w, scale, outliers = (table[start:stop] for table in tiles.tables.values())
    return CompactTiles(w, scale, outliers, rows, tiles.k, "all" if tiles.part == "all" else "both")


def unpacked(tiles: CompactTiles) -> Tensor:
    """Unpack tiles to weight[N, K] bfloat16; by the device's kernel on a GPU."""
    if tiles.w.device.type == "cpu":
        return tiles.unpack()
    weight = torch.empty(tiles.rows, tiles.k, dtype=torch.bfloat16, device=tiles.w.device)
    binding.unpack(tiles.launch(), weight, interleaved=tiles.part != "all")
    return weight if tiles.part in ("all", "both") else weight.chunk(2)[tiles.part == "up"]


def _rows(tiles: CompactTiles) -> gradient.Rows:
    """The rows of the weight, unpacked at once: it is bfloat16."""
    return gradient.of_rows(Plain(unpacked(tiles)), float_linear.dense)


@operation("compact_linear")
def compact_linear(
    x: Tensor, w: Tensor, scale: Tensor, outliers: Tensor, n: int, k: int, part: str = "all", bias: Tensor | None = None
) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, contiguous. The arguments between x and bias[N] are a
    CompactTiles.

    Raises KernelError for arguments that do not fit together.
    """
    args = (x, w, scale, outliers, n, k, part, bias)
    y: Tensor = dispatch.run(OP, spec, x.device, args)
    return y


compact_linear.register_fake(common.rows_like(spec))
gradient.differentiate(compact_linear, CompactTiles, _rows)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, weights with outliers, a row of zeros, interleaved tiles."""

    def weight(generator: torch.Generator, device: torch.device, n: int, k: int) -> Tensor:
        w = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
        w[0, :2], w[-1, k // 2] = 0.0, 3e3
        w[n // 2] = 0.0
        return w.to(device)

    def case(m: int, n: int, k: int, bias: bool, part: str = "all") -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            tiles = CompactTiles.pack(weight(generator, device, n, k))
            if part != "all":
                tiles = tiles.pair().replace(n=n if part == "both" else n // 2, part=part)
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            return x, *tiles, torch.randn(tiles.n, generator=generator).to(device, dtype) if bias else None

        return Case(f"m{m}-n{n}-k{k}{'-bias' if bias else ''}{'' if part == 'all' else '-' + part}", make)

    plain = [case(m, n, k, bias) for m, n, k, _, bias in common.SIZES]
    interleaved = [case(m, 96, 160, True, part) for part in ("both", "gate", "up") for m in (1, 9, 70)]
    return [*plain, case(5, 33, 65, True), *interleaved]


IMPLEMENTATIONS = {
    "hip": Implementation(by_hip, why_not),
    "hip_unpack": Implementation(by_hip_unpack, unpack_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(compact_linear, reference, spec, IMPLEMENTATIONS, cases, blocks)}
