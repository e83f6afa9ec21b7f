"""GEMMs of 8 bits with a fused epilogue; ops/linear/gemm_w8a8.py (int8, int32 sums) and gemm_fp8.py.

Many rows: tiles of A and B, whose products are the matrix units' own (wgmma on Hopper, which loads them by TMA, and
where a tile fills an SM a program takes several, one after the other). Few
rows: the weight's rows are the M dimension of the matrix instruction, K is split where there are too few blocks for the
GPU, and a second kernel adds the splits' sums and finishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.triton import gemm_w8a8_kernels as kernels
from accelpatch.kernels.triton.gated_activation import CODES
from accelpatch.kernels.triton.gemm import Block
from accelpatch.kernels.triton.launch import cdiv, on, processors

LEAST_RUN = 1024  # least length of a K split
GROUP = 8  # tiles of A's rows that run together, so that they read B's from L2
DESCRIPTORS = find_spec("triton.tools.tensor_descriptor") is not None  # since Triton 3.4

Tiles = tuple[tuple[int, Block], ...]
#: (rows of A from which on it is used, tile), the largest first; measured on Hopper
TILES = ((1024, Block(128, 256, 128, 8, 3)), (0, Block(64, 128, 128, 4, 4)))
#: the same where the epilogue takes more of an SM's shared memory: a matrix behind the sums, or an E of 32 bits
MORE_BEHIND = ((1024, Block(128, 128, 128, 8, 3)), TILES[1])
GATED = ((0, Block(128, 128, 128, 8, 4)),)
#: of 8-bit floats, whose sums take twice the registers where they are added up UNIT_SUMS at a time
FP8_TILES = ((0, Block(128, 128, 128, 8, 4)),)
FP8_GATED = ((0, Block(128, 64, 128, 8, 4)),)
FILLS = 256  # rows of B from which on one tile takes the shared memory of an SM
UNIT_SUMS = 128  # that Hopper's matrix unit adds up itself, with 14 bits; see gemm_w8a8_kernels.py
AMD_TILES = ((0, Block(128, 128, 64, 8, 2)),)
#: rows of A up to which it is used -> tile of a stream of B
STREAMS: Mapping[int, Block] = MappingProxyType({
    16: Block(16, 64, 256, 4, 3), 32: Block(32, 64, 256, 4, 3), 64: Block(64, 64, 128, 4, 5),
    128: Block(128, 64, 128, 4, 4),
})  # fmt: skip
AMD_STREAMS: Mapping[int, Block] = MappingProxyType({  # more would spill
    16: Block(16, 64, 256, 4, 3), 32: Block(32, 64, 256, 4, 3), 64: Block(64, 64, 128, 4, 2),
})  # fmt: skip


@dataclass(frozen=True)
class Epilogue:
    """What is behind the sums, as kernels take it; a tensor that is None has `e` in its place, and is not read."""

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, float]
    flags: tuple[Any, ...]
    d_row: int
    d_batch: int

    @property
    def has_matrix(self) -> bool:
        """Whether a matrix of E's size is read."""
        return self.d_row > 0 or bool(self.flags[4])


def _epilogue(
    e: Tensor, alpha: float, row_scale: Tensor | None, column_scale: Tensor | None, d: Tensor | None, beta: float,
    correction: Tensor | None, activation: str, residual: Tensor | None,
) -> Epilogue:  # fmt: skip
    rows, columns = (None if one is None else one.to(torch.float32).contiguous() for one in (row_scale, column_scale))
    d, correction, residual = (None if one is None else one.contiguous() for one in (d, correction, residual))
    given = (rows, columns, d, correction, residual)
    matrix = d is not None and d.dim() > 1
    code = -1 if activation == "none" else CODES[activation]
    return Epilogue(
        tuple(e if one is None else one for one in given), (alpha, beta),
        (rows is not None, columns is not None, int(d is not None) + matrix, correction is not None,
         residual is not None, code),
        e.shape[-1] if matrix else 0, e.shape[-2] * e.shape[-1] if matrix else 0,
    )  # fmt: skip


def gemm_w8a8(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """As the operation."""
    a, b, dtype = _rows(a), _rows(b), rest[-1]
    e = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=dtype)
    if e.numel():
        with on(a):
            streamed = a.dim() == 2 and a.shape[0] <= max(_streams())
            (_by_stream if streamed else _by_tiles)(a, b, e, _epilogue(e, *rest[:-1]))
    return e


def gemm_fp8(
    a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As the operation."""
    return gemm_w8a8(a, b, 1.0, row_scale, column_scale, bias, 1.0, None, "none", None, dtype)


def gated(a: Tensor, b: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, activation: str,
          dtype: torch.dtype) -> Tensor:  # fmt: skip
    """activation(first half of the columns) * second half of A[M, K] . B[N, K]^T with scales and bias: [M, N / 2]."""
    a, b = _rows(a), _rows(b)
    (m, k), n = a.shape, b.shape[0] // 2
    e = a.new_empty((m, n), dtype=dtype)
    if m:
        tile = _tile(a, m, GATED, FP8_GATED)
        bias = None if bias is None else bias.contiguous()
        with on(a):
            left, right, out, tma = _operands(a, b, e, tile, halves=2)
            kernels.gated[(cdiv(m, tile.tokens) * cdiv(n, tile.rows),)](
                left, right, out, e, row_scale.contiguous(), column_scale.contiguous(), e if bias is None else bias,
                m, n, k, a.stride(0), b.stride(0), bias is not None, CODES[activation], tma, k % tile.columns == 0,
                tile.tokens, tile.rows, tile.columns, GROUP, *_sums(a), **tile.options(),
            )  # fmt: skip
    return e


def _rows(matrix: Tensor) -> Tensor:
    """A matrix with contiguous rows; a batch wholly contiguous. Copied only where needed."""
    fits = matrix.is_contiguous() if matrix.dim() == 3 else matrix.stride(1) == 1
    return matrix if fits else matrix.contiguous()


def _operands(a: Tensor, b: Tensor, e: Tensor, tile: Block, halves: int = 1) -> tuple[Any, Any, Any, bool]:
    """A, B and E as the kernels take them, and whether those are descriptors of tiles: Hopper's TMA needs rows at
    multiples of 16 bytes. halves: 2 where a tile has rows of both halves of B."""
    facts = probe(a.device).facts
    able = DESCRIPTORS and facts is not None and facts.matrix == "wgmma" and a.dim() == 2
    if not able or any(one.stride(0) * one.element_size() % 16 or one.data_ptr() % 16 for one in (a, b, e)):
        return a, b, e, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    of, n = TensorDescriptor.from_tensor, b.shape[0] // halves
    row = b.stride(0)
    weight = (
        of(b, [tile.rows, tile.columns])
        if halves == 1
        else TensorDescriptor(b, [halves, n, b.shape[1]], [n * row, row, 1], [halves, tile.rows, tile.columns])
    )
    return of(a, [tile.tokens, tile.columns]), weight, of(e, [tile.tokens, tile.rows]), True


def _sums(a: Tensor) -> tuple[int, ...]:
    """The kernels' last argument, FLOAT; int8 has its default."""
    return () if a.dtype == torch.int8 else (UNIT_SUMS if not torch.version.hip else -1,)


def _tile(a: Tensor, m: int, integers: Tiles, floats: Tiles) -> Block:
    tiles = AMD_TILES if torch.version.hip else integers if a.dtype == torch.int8 else floats
    return next(one for least, one in tiles if m >= least)


def _streams() -> Mapping[int, Block]:
    return AMD_STREAMS if torch.version.hip else STREAMS


def _by_tiles(a: Tensor, b: Tensor, e: Tensor, epilogue: Epilogue) -> None:
    (m, k), n, batch = a.shape[-2:], b.shape[-2], a.shape[0] if a.dim() == 3 else 1
    more = epilogue.has_matrix or e.element_size() > 2
    tile = _tile(a, m, MORE_BEHIND if more else TILES, FP8_TILES)
    left, right, out, tma = _operands(a, b, e, tile)
    programs = cdiv(m, tile.tokens) * cdiv(n, tile.rows)
    if tma and tile.rows >= FILLS:
        programs = min(programs, processors(a.device))
    kernels.tiles[(programs, batch)](
        left, right, out, e, *epilogue.tensors, *epilogue.numbers, m, n, k, a.stride(-2), b.stride(-2), epilogue.d_row,
        epilogue.d_batch, *epilogue.flags, tma, k % tile.columns == 0, tile.tokens, tile.rows, tile.columns, GROUP,
        *_sums(a), **tile.options(),
    )  # fmt: skip


def _by_stream(a: Tensor, b: Tensor, e: Tensor, epilogue: Epilogue) -> None:
    (m, k), n = a.shape, b.shape[0]
    tile = next(one for most, one in _streams().items() if m <= most)
    blocks = cdiv(n, tile.rows)
    runs = max(1, min(2 * processors(a.device) // blocks, k // LEAST_RUN, 8))
    run = cdiv(k, runs * tile.columns) * tile.columns
    splits = cdiv(k, run)
    kind = torch.int32 if a.dtype == torch.int8 else torch.float32
    parts = a.new_empty((splits, m, n), dtype=kind) if splits > 1 else e
    kernels.stream[(blocks, splits)](
        a, b, e, parts, *epilogue.tensors, *epilogue.numbers, m, n, k, a.stride(0), b.stride(0), epilogue.d_row, run,
        *epilogue.flags, k % tile.columns == 0, splits > 1, tile.tokens, tile.rows, tile.columns, *_sums(a),
        **tile.options(),
    )  # fmt: skip
    if splits > 1:
        kernels.add_up[(m, cdiv(n, 1024))](
            parts, e, *epilogue.tensors, *epilogue.numbers, m, n, epilogue.d_row, splits, *epilogue.flags, 1024,
            *_sums(a),
        )  # fmt: skip
