"""The linear operation of each weight layout: a row of `LINEARS` a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int8Rows, Plain
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.operation import Operation
from accelpatch.kernels.ops.linear import (
    block_linear,
    compact_linear,
    float_linear,
    fp8_linear,
    int8_linear,
    packed_linear,
    tiled_int4_linear,
    w8a8_linear,
    w8a8_packed,
)
from accelpatch.kernels.triton import launch

Gated = Callable[[Tensor, Any, Tensor | None], Tensor]


def no_facts(x: Tensor, *weight: Any) -> dispatch.Facts:
    """Of operations whose choice depends on shapes, dtypes and devices alone."""
    return ()


@dataclass(frozen=True)
class LinearOf:
    """y[M, N] = x[M, K] @ w^T + bias for weights of one layout.

    operation: torch's custom op over x, the layout's `arguments()` and the bias. facts: those of its dispatch, from the
    same arguments without the bias. gated: implementations of the operation that compute silu(first half of the
    columns) * second half in one launch, by name: (x, weight, bias) -> y. many: makes a function of x for more rows
    than `binding.MAX_ROWS`, by Triton, once a weight, or returns None.
    """

    operation: Operation[Tensor]
    facts: Callable[..., dispatch.Facts] = no_facts
    gated: Mapping[str, Gated] = field(default_factory=dict)
    many: Callable[[Any, Tensor | None], Callable[[Tensor], Tensor] | None] | None = None

    @property
    def op(self) -> str:
        """The operation's name in dispatch.TABLE."""
        return str(self.operation.custom._qualname).partition("::")[2]


def _gated_plain(x: Tensor, weight: Plain, bias: Tensor | None) -> Tensor:
    return float_linear.by_triton(x, weight.w, bias, gate=True)


def _gated_w8a8(x: Tensor, weight: W8A8Rows, bias: Tensor | None) -> Tensor:
    return w8a8_linear.gated_many(x, weight.w, weight.scale, weight.input_scale, bias)


def _many_tiles(weight: Tiles, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """torch's GEMM with weights written out as floats by Triton."""
    if weight.part not in ("all", "both") or launch.why_not(probe(weight.w.device)) is not None:
        return None
    from accelpatch.kernels.triton.weight_only import written_out

    return written_out(weight, bias)


LINEARS: Mapping[type, LinearOf] = {
    Plain: LinearOf(float_linear.float_linear, float_linear.facts, {"triton": _gated_plain}),
    Int8Rows: LinearOf(int8_linear.int8_linear),
    W8A8Rows: LinearOf(w8a8_linear.w8a8_linear, gated={"triton": _gated_w8a8}),
    Fp8Rows: LinearOf(fp8_linear.fp8_linear),
    Tiles: LinearOf(
        tiled_int4_linear.tiled_int4_linear,
        tiled_int4_linear.facts,
        {"hip_gemm": tiled_int4_linear.gated_many},
        _many_tiles,
    ),
    GgufBlocks: LinearOf(block_linear.block_linear),
    CompactTiles: LinearOf(compact_linear.compact_linear),
    Pack: LinearOf(packed_linear.packed_linear),
    W8A8Pack: LinearOf(w8a8_packed.w8a8_packed),
}
