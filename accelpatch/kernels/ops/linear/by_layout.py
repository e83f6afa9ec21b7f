"""The linear operation of each weight layout, and the layout that a device has of a canonical weight: `LINEARS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks
from accelpatch.kernels.layouts.int3_tiles import Int3Tiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import Layout
from accelpatch.kernels.layouts.row_major import FP8, Fp8Rows, Int3Rows, Int4Rows, Int8Rows, Plain, RowMajor
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.operation import Operation, wants_gradient
from accelpatch.kernels.ops.linear import (
    block_linear,
    common,
    compact_linear,
    float_linear,
    fp8_linear,
    int3_linear,
    int4_linear,
    int8_embedding,
    int8_linear,
    packed_linear,
    tiled_int3_linear,
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
    columns) * second half in one launch, by name: (x, weight, bias) -> y. many: makes a function of x for many
    rows, by Triton, once a weight, or returns None.

    Of canonical layouts: dense: (dtype, *arguments, bias) -> the weight and the bias as floats. packed: the weight in
    the layout of the native CPU kernels. tiles: as a GPU reads it for x of a dtype; None where it reads the rows.
    embedding: the rows of ids, in a dtype; of layouts of tables. weight_only: of layouts whose operation rounds x too:
    the same weight in a layout whose operation does not, and so has a gradient.
    """

    operation: Operation[Tensor]
    facts: Callable[..., dispatch.Facts] = no_facts
    gated: Mapping[str, Gated] = field(default_factory=dict)
    many: Callable[[Any, Tensor | None], Callable[[Tensor], Tensor] | None] | None = None
    dense: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    packed: Callable[[Any], Any] | None = None
    tiles: Callable[[Any, torch.dtype], Layout | None] = lambda rows, dtype: None
    embedding: Callable[[Tensor, Any, torch.dtype], Tensor] | None = None
    weight_only: Callable[[Any], Layout] | None = None

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


def _dense_w8a8(dtype: torch.dtype, q: Tensor, scale: Tensor, given: Tensor | None, bias: Tensor | None) -> Any:
    return int8_linear.dense(dtype, q, scale, bias)


def _weight_only(rows: W8A8Rows) -> Layout:
    return (Fp8Rows if rows.w.dtype in FP8 else Int8Rows)(rows.w, rows.scale, order=rows.order)


def _packed_blocks(rows: GgufBlocks) -> Pack:
    return Pack.of_blocks(rows.w, rows.k, rows.form)


LINEARS: Mapping[type, LinearOf] = {
    Plain: LinearOf(float_linear.float_linear, float_linear.facts, {"triton": _gated_plain}, dense=float_linear.dense),
    Int8Rows: LinearOf(
        int8_linear.int8_linear,
        dense=int8_linear.dense,
        packed=Pack.of,
        embedding=lambda ids, rows, dtype: int8_embedding.int8_embedding(ids, rows.w, rows.scale, dtype),
    ),
    Int4Rows: LinearOf(
        int4_linear.int4_linear, dense=int4_linear.dense, packed=Pack.of, tiles=tiled_int4_linear.tiles_for
    ),
    Int3Rows: LinearOf(
        int3_linear.int3_linear, dense=int3_linear.dense, packed=Pack.of, tiles=tiled_int3_linear.tiles_for
    ),
    Int3Tiles: LinearOf(tiled_int3_linear.tiled_int3_linear),
    W8A8Rows: LinearOf(
        w8a8_linear.w8a8_linear,
        gated={"triton": _gated_w8a8},
        dense=_dense_w8a8,
        packed=W8A8Pack.of,
        weight_only=_weight_only,
    ),
    Fp8Rows: LinearOf(fp8_linear.fp8_linear, dense=fp8_linear.dense),
    GgufBlocks: LinearOf(
        block_linear.block_linear,
        dense=block_linear.dense,
        packed=_packed_blocks,
        embedding=lambda ids, rows, dtype: block_linear.block_embedding(ids, rows.w, rows.form, dtype),
    ),
    Tiles: LinearOf(
        tiled_int4_linear.tiled_int4_linear,
        tiled_int4_linear.facts,
        {"hip_gemm": tiled_int4_linear.gated_many},
        _many_tiles,
    ),
    CompactTiles: LinearOf(compact_linear.compact_linear),
    Pack: LinearOf(
        packed_linear.packed_linear,
        embedding=lambda ids, pack, dtype: packed_linear.packed_embedding(ids, dtype, *pack.arguments()),
    ),
    W8A8Pack: LinearOf(w8a8_packed.w8a8_packed, weight_only=W8A8Pack.weight_only),
}


def linear(x: Tensor, weight: Layout, bias: Tensor | None, *, training: bool = False) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias in x's dtype, by the operation of the weight's layout.

    Where x would be rounded to the weight's form, it is not while its gradient is wanted, nor in training mode, whose
    calls without gradients belong to a backward pass too (gradient checkpointing).
    """
    weight_only = LINEARS[type(weight)].weight_only
    if weight_only is not None and (training or wants_gradient((x, bias))):
        weight = weight_only(weight)
    if weight.order is not None and not weight.orders:
        x = x.index_select(-1, weight.order)
    return LINEARS[type(weight)].operation(x, *weight.arguments(), bias)


def trained_as(weight: Layout) -> tuple[Layout, Operation[Tensor]]:
    """The weight in the layout that is multiplied by while a gradient is wanted, and that layout's operation."""
    weight_only = LINEARS[type(weight)].weight_only
    weight = weight if weight_only is None else weight_only(weight)
    return weight, LINEARS[type(weight)].operation


def embedded(ids: Tensor, table: Layout, dtype: torch.dtype) -> Tensor:
    """rows[..., K] of a table[N, K] in `dtype`, by the operation of its layout; ids[...] in 0..N-1, else IndexError."""
    embedding = LINEARS[type(table)].embedding
    assert embedding is not None
    return embedding(ids, table, dtype)


def dequantized(weight: Layout, dtype: torch.dtype) -> Tensor:
    """w[N, K] in `dtype`, computed in float32 or wider and rounded once; columns in the order of the inputs."""
    rows = weight.canonical()
    dense = LINEARS[type(rows)].dense
    assert dense is not None
    return common.dense_of(rows, dense, dtype, None)[0]


def laid_out(rows: RowMajor, dtype: torch.dtype, *, packable: bool) -> Layout:
    """A canonical weight in the layout that its device's kernels read for x of `dtype`, or as it is.

    packable: whether native CPU kernels were planned. Raises KernelError for what the layout cannot hold.
    """
    row = LINEARS[type(rows)]
    if packable and rows.w.device.type == "cpu" and row.packed is not None:
        packed: Layout = row.packed(rows)
        return packed
    return row.tiles(rows, dtype) or rows
