"""The linear operation of each weight layout: a row of `LINEARS` a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int8Rows, Plain
from accelpatch.kernels.ops import compact_linear, fp8_linear, gemv, int8_linear, tiled_int4_linear
from accelpatch.kernels.triton import launch


@dataclass(frozen=True)
class LinearOf:
    """y[M, N] = x[M, K] @ w^T + bias for weights of one layout.

    operation: torch's custom op. by_hip: its implementation on a GPU, which bypasses torch's dispatcher; both take x,
    the layout's `arguments()` and the bias. gated: silu(first half of the columns) * second half in one launch on a
    GPU; it returns None where that is not possible for this x. many: makes a function of x for more rows than
    `binding.MAX_ROWS`, once a weight, or returns None.
    """

    operation: Callable[..., Any]
    by_hip: Callable[..., Any]
    gated: Callable[[Tensor, Any, Tensor | None], Tensor | None] | None = None
    many: Callable[[Any, Tensor | None], Callable[[Tensor], Tensor] | None] | None = None


def _gated_plain(x: Tensor, weight: Plain, bias: Tensor | None) -> Tensor | None:
    return gemv.by_gemm(x, weight.w, bias, gate=True) if gemv.gemm_fits(x, weight.w) else None


def _gated_tiles(x: Tensor, weight: Tiles, bias: Tensor | None) -> Tensor | None:
    return tiled_int4_linear.gated_many(x, weight, bias) if tiled_int4_linear.gemm_fits(x, weight) else None


def _many_tiles(weight: Tiles, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """torch's GEMM with weights written out as floats by Triton."""
    if weight.part not in ("all", "both") or launch.why_not(probe(weight.w.device)) is not None:
        return None
    from accelpatch.kernels.triton.weight_only import written_out

    return written_out(weight, bias)


LINEARS: Mapping[type, LinearOf] = {
    Plain: LinearOf(gemv.gemv, gemv.by_hip, _gated_plain),
    Int8Rows: LinearOf(int8_linear.int8_linear, int8_linear.by_hip),
    Fp8Rows: LinearOf(fp8_linear.fp8_linear, fp8_linear.by_hip),
    Tiles: LinearOf(tiled_int4_linear.tiled_int4_linear, tiled_int4_linear.by_hip, _gated_tiles, _many_tiles),
    CompactTiles: LinearOf(compact_linear.compact_linear, compact_linear.by_hip),
}
