"""Linear layer with a 3-bit weight in the tile layout of the HIP kernels (layouts/int3_tiles.py):
y[M, N] = x[M, K] @ w[N, K]^T + bias[N].

The tiles are the only copy of the weight that a module on a GPU holds. They have the same values as in int3_linear: the
reference unpacks them and runs its.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts import int3_tiles, int4_tiles
from accelpatch.kernels.layouts.int3_tiles import TILE_BYTES, Int3Tiles
from accelpatch.kernels.layouts.row_major import Int3Rows
from accelpatch.kernels.layouts.tiled import in_order, in_tiles
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient, int3_linear
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "tiled_int3_linear"
FUNCTION = "gemv_int3"


def tiles_for(rows: Int3Rows, dtype: torch.dtype) -> Int3Tiles | None:
    """Tiles of a canonical weight on a GPU where `hip` would run on them for x of `dtype`; else None."""
    device = rows.w.device
    if device.type != "cuda":
        return None
    wanted = of_shape(rows.n, rows.k, dtype, rows.k // rows.scale.shape[1], rows.kind, rows.scale.dtype)
    fits = why_not(wanted, probe(device)) is None and int4_tiles.exact(rows.offset, rows.scale.dtype)
    return Int3Tiles.of(rows) if fits else None


def dense(dtype: torch.dtype, *args: Any) -> tuple[Tensor, Tensor | None]:
    """The tiles' weight as floats in `dtype`, and the bias."""
    *rest, bias = args
    return int3_linear.dense(dtype, *Int3Tiles(*rest).canonical().arguments(), bias)


def blocks(*args: Any) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    *rest, bias = args
    return int3_linear.blocks(*Int3Tiles(*rest).canonical().arguments(), bias)


def reference(x: Tensor, *args: Any) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *args))


def spec(x: Tensor, *args: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    *rest, bias = args
    tiles = Int3Tiles(*rest)
    n, k = tiles.n, tiles.k
    require(x.dim() >= 1 and x.dtype in FLOATS, OP, f"x is float [..., K], not {say(x)}")
    require(x.shape[-1] == k, OP, f"x has {x.shape[-1]} features, the weight {k}")
    place = int4_tiles.places(k, tiles.group)
    size = [-(-tiles.rows // TILE_ROWS), place["steps"], TILE_BYTES]
    require(list(tiles.w.shape) == size, OP, f"the tiles of [{tiles.rows}, {k}] are {size}, not {say(tiles.w)}")
    interleaved = tiles.part == "all" or tiles.rows % (2 * TILE_ROWS) == 0
    require(interleaved, OP, f"paired tiles hold a multiple of {2 * TILE_ROWS} rows, not {tiles.rows}")
    sets = ((place["steps"] - 1) >> place["group_shift"]) + 1
    size = [size[0], sets, TILE_ROWS // 2, place["groups"], 2]
    for table in (tiles.scale, tiles.scale if tiles.offset is None else tiles.offset):
        require(list(table.shape) == size, OP, f"scale and offset are {size}, not {say(table)}")
    common.check_beside(OP, x, n, bias, w=tiles.w, scale=tiles.scale, offset=tiles.offset)
    return of_shape(n, k, x.dtype, tiles.group, tiles.kind, tiles.scale.dtype, m=x.numel() // k)


def of_shape(
    n: int, k: int, dtype: torch.dtype, group: int, offset: str, scale_dtype: torch.dtype = torch.float16, *, m: int = 1
) -> Spec:
    """The Spec of a linear layer of this size, for planning before there are tiles."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype, scale_dtype, group, offset)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    assert spec.group_size is not None
    reason = int4_tiles.unfit(spec.sizes["K"], spec.group_size, spec.scale_dtype)
    reason = reason or binding.why_not(spec, device, FUNCTION, _variant(spec))
    return reason or common.too_many_rows(spec, binding.MAX_ROWS)


def _variant(spec: Spec) -> str:
    group = spec.group_size or 0
    return int3_tiles.variant_of(0 if group == spec.sizes["K"] else group, spec.offset)


def libraries(spec: Spec, device: Device) -> tuple[str, ...]:
    """The device library of such a weight on a device."""
    return (binding.library_name(FUNCTION, spec.dtype, _variant(spec)),)


def by_hip(x: Tensor, *args: Any) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x.

    A gate or up in interleaved tiles computes the other's columns too, and drops them.
    """
    *rest, bias = args
    tiles = Int3Tiles(*rest)
    return in_order(binding.launch(tiles.launch(), x, bias=in_tiles(bias, tiles.part)), tiles.part)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    return common.too_large(spec) or launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, *args: Any) -> Tensor:
    """The implementation `triton`: dequantises slices of the weight for torch's GEMM."""
    from accelpatch.kernels.triton.int3_rows import tiled_int3_linear as run

    *rest, bias = args
    tiles = Int3Tiles(*rest)
    return run(x, tiles if tiles.part == "both" else tiles.alone(), bias)


def by_torch(x: Tensor, *args: Any) -> Tensor:
    """The implementation `torch`: unpacks the tiles, and dequantises the weight in blocks of rows."""
    *rest, bias = args
    q, scale, offset = Int3Tiles(*rest).canonical().arguments()
    return int3_linear.by_torch(x, q, scale, offset, bias)


@operation(OP)
def tiled_int3_linear(
    x: Tensor, w: Tensor, scale: Tensor, offset: Tensor | None, n: int, k: int, group: int, kind: str,
    part: str = "all", bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, contiguous. The arguments between x and bias[N] are an
    Int3Tiles.

    Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run(OP, spec, x.device, (x, w, scale, offset, n, k, group, kind, part, bias))
    return y


tiled_int3_linear.register_fake(common.rows_like(spec))


def _rows(tiles: Int3Tiles) -> gradient.Rows:
    """The rows of the weight, of the codes, which are put in order at once."""
    return gradient.of_rows(tiles.canonical(), int3_linear.dense)


gradient.differentiate(tiled_int3_linear, Int3Tiles, _rows)


def cases() -> list[Case]:
    """The cases of int3_linear that have tiles, as tiles; and interleaved tiles."""

    def tiled(case: Case) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, q, scale, offset, bias = case.make(generator, dtype, device)
            return x, *Int3Tiles.of(Int3Rows(q, scale, offset)), bias

        return Case(case.id, make)

    def interleaved(part: str, m: int) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            q = torch.randint(-128, 128, (96, 60), generator=generator, dtype=torch.int8).to(device)
            scale, least = (torch.rand(2, 96, 5, generator=generator) / 100).to(device, torch.float16)
            x = torch.randn(m, 160, generator=generator).to(device, dtype)
            both = Int3Tiles.of(Int3Rows(q, scale, least)).pair()
            tiles = both if part == "both" else both.replace(n=48, part=part)
            return x, *tiles, torch.randn(tiles.n, generator=generator).to(device, dtype)

        return Case(f"m{m}-paired-{part}", make)

    def fits(size: tuple[int, int, int, int, bool]) -> bool:
        _, _, k, groups, _ = size
        k = max(k // int3_linear.CODES, 1) * int3_linear.CODES
        return k % groups == 0 and int4_tiles.unfit(k, k // groups, torch.float16) is None

    whole = [tiled(case) for case, size in zip(int3_linear.cases(), common.SIZES, strict=True) if fits(size)]
    return whole + [interleaved(part, m) for part in ("both", "gate", "up") for m in (1, 9, 70)]


IMPLEMENTATIONS = {
    "hip": Implementation(by_hip, why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(tiled_int3_linear, reference, spec, IMPLEMENTATIONS, cases, blocks)}
