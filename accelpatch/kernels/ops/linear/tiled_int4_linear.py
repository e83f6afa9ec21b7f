"""Linear layer with a 4-bit weight in the tile layout of the HIP kernels (layouts/tiling.py): y = x @ w[N, K]^T + bias.

The tiles (int4_tiles.py) are the only copy of the weight that a module on a GPU holds. They have the same values as in
int4_linear: the reference unpacks them and runs its.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import KIB, Device, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.codebooks import CODEBOOKS, NVFP4, scale_dtype
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts import int4_tiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.kernels.layouts.tiled import in_order, in_tiles
from accelpatch.kernels.layouts.tiling import TILE_ROWS, TILE_VALUES
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient, int4_linear, tiled, wgmma
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP, GEMM = "tiled_int4_linear", "int4_gemm"
GEMM_SHARED = 227 * KIB  # of a block


def tiles_for(rows: Int4Rows, dtype: torch.dtype) -> Tiles | None:
    """Tiles of a canonical weight on a GPU where `hip` would run on them for x of `dtype`; else None."""
    device = rows.w.device
    if device.type != "cuda":
        return None
    wanted = of_shape(rows.n, rows.k, dtype, rows.k // rows.scale.shape[1], rows.kind, rows.scale.dtype)
    fits = why_not(wanted, probe(device)) is None and int4_tiles.exact(rows.offset, rows.scale.dtype)
    return Tiles.of(rows) if fits else None


def dense(dtype: torch.dtype, *args: Any) -> tuple[Tensor, Tensor | None]:
    """The tiles' weight as floats in `dtype`, and the bias."""
    *rest, bias = args
    return int4_linear.dense(dtype, *Tiles(*rest).canonical().arguments(), bias)


def blocks(*args: Any) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""
    *rest, bias = args
    return int4_linear.blocks(*Tiles(*rest).canonical().arguments(), bias)


def reference(x: Tensor, *args: Any) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, *args))


def spec(x: Tensor, *args: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    *rest, bias = args
    tiles = Tiles(*rest)
    offset = None if tiles.kind == NVFP4 else tiles.offset  # which has factors of rows there
    tiled.check(OP, x, tiles, TILE_ROWS * TILE_VALUES // 2, offset, bias)
    scale = scale_dtype(tiles.kind) if tiles.kind in CODEBOOKS else tiles.scale.dtype  # not that of its tables
    return of_shape(tiles.n, tiles.k, x.dtype, tiles.group, tiles.kind, scale, m=x.numel() // tiles.k)


def of_shape(
    n: int, k: int, dtype: torch.dtype, group: int, offset: str, scale_dtype: torch.dtype = torch.float16, *, m: int = 1
) -> Spec:
    """The Spec of a linear layer of this size, for planning before there are tiles."""
    return Spec(OP, {"M": m, "N": n, "K": k}, dtype, scale_dtype, group, offset)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    return _unfit(spec, device, *gemv_of(spec)) or common.too_many_rows(spec, binding.MAX_ROWS)


def gemv_of(spec: Spec) -> tuple[str, str]:
    """The function that `by_hip` launches, and its variant."""
    assert spec.group_size is not None
    return int4_tiles.gemv_of(0 if spec.group_size == spec.sizes["K"] else spec.group_size), spec.offset


def libraries(spec: Spec, device: Device) -> tuple[str, ...]:
    """The device libraries of such a weight on a device, for few rows and for 9 to 64."""
    function, variant = gemv_of(spec)
    many = replace(spec, sizes={**spec.sizes, "M": binding.MAX_ROWS})
    gemm = () if gemm_why_not(many, device) else (binding.library_name(GEMM, spec.dtype),)
    return binding.library_name(function, spec.dtype, variant), *gemm


def _unfit(spec: Spec, device: Device, function: str, variant: str = "") -> str | None:
    assert spec.group_size is not None
    k, group = spec.sizes["K"], spec.group_size
    return int4_tiles.unfit(k, group, spec.scale_dtype, spec.offset) or binding.why_not(spec, device, function, variant)


def by_hip(x: Tensor, *args: Any) -> Tensor:
    """The implementation `hip`: reads the weight once per 8 rows of x.

    A gate or up in interleaved tiles computes the other's columns too, and drops them.
    """
    return _in_order(x, args)


def gemm_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip_gemm` cannot run a spec: it takes 1 to 64 rows on Hopper and later, and groups of 128 or more."""
    m, k, group = spec.sizes["M"], spec.sizes["K"], spec.group_size
    if reason := _unfit(spec, device, GEMM) or common.too_many_rows(spec, binding.MAX_ROWS):
        return reason
    if not m:
        return "x has no rows"
    if device.facts is None or not device.facts.clusters or device.facts.block_shared < GEMM_SHARED:
        return f"it needs clusters and {GEMM_SHARED // KIB} KiB of shared memory a block, which {device.arch} has not"
    if group is None or group < TILE_VALUES:
        return f"groups of {group} are smaller than {TILE_VALUES}"
    aligned = k % 8 == 0 and spec.options.get("aligned", True)
    return None if aligned else f"rows of x do not begin at multiples of 16 bytes (K = {k})"


def by_hip_gemm(x: Tensor, *args: Any) -> Tensor:
    """The implementation `hip_gemm`: one launch of the GEMM of floats (int4_gemm.hip)."""
    return _in_order(x, args, gemm=True)


def _in_order(x: Tensor, args: tuple[Any, ...], gemm: bool = False) -> Tensor:
    *rest, bias = args
    tiles = Tiles(*rest)
    return in_order(launched(x, tiles, in_tiles(bias, tiles.part), gemm), tiles.part)


def facts(x: Tensor, *tiles: Any) -> dispatch.Facts:
    """Whether rows of x are aligned to 16 bytes (those with gaps are copied), which `by_hip_gemm` depends on."""
    m = x.shape[:-1].numel()
    if not (m > binding.MAX_GEMV_ROWS or dispatch.watched()) or m > binding.MAX_ROWS or not m:  # else it may be forced
        return ()
    rows = x.reshape(m, x.shape[-1])
    return (("aligned", rows.stride(1) != 1 or (rows.data_ptr() % 16 == 0 and rows.stride(0) % 8 == 0)),)


def launched(x: Tensor, tiles: Tiles, bias: Tensor | None, gemm: bool, activation: str = "none") -> Tensor:
    """Call the device library; bias and result are in the order of rows in the tiles."""
    return binding.launch(tiles.launch(gemm), x, bias=bias, activation=activation)


def gated_many(x: Tensor, tiles: Tiles, bias: Tensor | None) -> Tensor:
    """silu(gate) * up for tiles of part "both", where `by_hip_gemm` can run.

    bias[2 N] is in the order of the weight's rows.
    """
    return launched(x, tiles, bias, True, "silu_gate")


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    return common.too_large(spec) or launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, *args: Any) -> Tensor:
    """The implementation `triton`: dequantises in registers, or for many rows into slices for torch's GEMM."""
    from accelpatch.kernels.triton.weight_only import rows_of, written
    from accelpatch.kernels.triton.weight_only import tiled_int4_linear as run

    *rest, bias = args
    tiles = Tiles(*rest)
    many = written(x.numel() // tiles.k)
    if tiles.part == "both" and many:
        return run(x, *args)
    if tiles.part != "all" and many:  # the columns of its own half alone
        return common.by_row_blocks(x, tiles.n, tiles.k, rows_of(tiles), bias)
    whole = tiles.replace(n=tiles.rows, part="all")
    return in_order(run(x, *whole, in_tiles(bias, tiles.part)), tiles.part)


def by_torch(x: Tensor, *args: Any) -> Tensor:
    """The implementation `torch`: unpacks the tiles, and dequantises the weight in blocks of rows."""
    *rest, bias = args
    tiles = Tiles(*rest).alone()

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        first, last = start // TILE_ROWS, -(-stop // TILE_ROWS)
        offsets = None if tiles.offset is None else tiles.offset[first:last]
        count = min(last * TILE_ROWS, tiles.n) - first * TILE_ROWS
        part = tiles.replace(w=tiles.w[first:last], scale=tiles.scale[first:last], offset=offsets, n=count)
        wide, inside = torch.promote_types(dtype, torch.float32), slice(start % TILE_ROWS, stop - first * TILE_ROWS)
        return int4_linear.dequantize_rows(*part.canonical().arguments(), wide)[inside]

    return common.by_row_blocks(x, tiles.n, tiles.k, rows, bias)


@operation("tiled_int4_linear")
def tiled_int4_linear(
    x: Tensor, w: Tensor, scale: Tensor, offset: Tensor | None, n: int, k: int, group: int, kind: str,
    part: str = "all", bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, contiguous. The arguments between x and bias[N] are a Tiles.

    Raises KernelError for arguments that do not fit together.
    """
    args = (x, w, scale, offset, n, k, group, kind, part, bias)
    y: Tensor = dispatch.run(OP, spec, x.device, args, facts(x))
    return y


tiled_int4_linear.register_fake(common.rows_like(spec))


def _rows(tiles: Tiles) -> gradient.Rows:
    """The rows of the weight: by Triton from the tiles, or of the codes, which are put in order at once."""
    if launch.why_not(probe(tiles.w.device)) is None:
        from accelpatch.kernels.triton.weight_only import rows_of

        return rows_of(tiles)
    return gradient.of_rows(tiles.canonical(), int4_linear.dense)


gradient.differentiate(tiled_int4_linear, Tiles, _rows)


def cases() -> list[Case]:
    """The cases of int4_linear that have tiles, as tiles; and interleaved tiles."""

    def in_tiles_of(case: Case) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, q, scale, offset, codes, bias = case.make(generator, dtype, device)
            scale = scale.to(scale_dtype(codes) if codes else torch.float16)
            return x, *Tiles.pack(q, scale, offset, codes), bias

        return Case(case.id, make)

    def interleaved(part: str, m: int) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            q = torch.randint(-128, 128, (96, 80), generator=generator, dtype=torch.int8).to(device)
            scale, least = (torch.rand(2, 96, 5, generator=generator) / 100).to(device, torch.float16)
            x = torch.randn(m, 160, generator=generator).to(device, dtype)
            both = Tiles.pack(q, scale, least).pair()
            tiles = both if part == "both" else both.replace(n=48, part=part)
            return x, *tiles, torch.randn(tiles.n, generator=generator).to(device, dtype)

        return Case(f"m{m}-paired-{part}", make)

    def of_codes(m: int, group: int, codebook: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            q = torch.randint(-128, 128, (65, 96), generator=generator, dtype=torch.int8).to(device)
            scale, offset = common.of_codes(torch.rand(65, 192 // group, generator=generator).to(device) / 10, codebook)
            x = torch.randn(m, 192, generator=generator).to(device, dtype)
            return (
                x,
                *Tiles.pack(q, scale, offset, codes=codebook),
                torch.randn(65, generator=generator).to(device, dtype),
            )

        return Case(f"m{m}-g{group}-{codebook}", make)

    books = ((64, "nf4"), (32, "nf4"), (64, "fp4"), (32, "e2m1"), (16, NVFP4))
    codes = [of_codes(m, group, book) for m in (1, 9, 70) for group, book in books]
    whole = [in_tiles_of(case) for case, size in zip(int4_linear.cases(), common.SIZES, strict=False) if _fits(size)]
    return whole + codes + [interleaved(part, m) for part in ("both", "gate", "up") for m in (1, 9, 70)]


def _fits(size: tuple[int, int, int, int, bool]) -> bool:
    _, _, k, groups, _ = size
    return int4_tiles.unfit(k, k // groups, torch.float16) is None


IMPLEMENTATIONS = {
    "hip_gemm": Implementation(by_hip_gemm, gemm_why_not),
    "hip": Implementation(by_hip, why_not),
    "triton_wgmma": Implementation(wgmma.by_int4, wgmma.int4_why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(tiled_int4_linear, reference, spec, IMPLEMENTATIONS, cases, blocks)}
