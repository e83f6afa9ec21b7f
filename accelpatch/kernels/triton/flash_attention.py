"""Attention of whole sequences, forward; see ../ops/attention/flash_attention.py.

One program has BLOCK_M queries of a head and goes once over the keys that they see, BLOCK_N at a time, with a running
softmax: partial results are scaled down whenever a larger score appears. Tiles that every query sees whole need no
masks; those at the low and the high end of what the block sees are loops of their own. Exponentials are powers of 2,
into which the scaling is folded. Programs with the most keys start first; the heads of a group run at the same time,
and only as many heads as have their keys and values in the L2 cache together. Source: Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.triton.flash_tiles import Tile, chosen, padded
from accelpatch.kernels.triton.launch import cdiv, on

DESCRIPTORS = find_spec("triton.tools.tensor_descriptor") is not None  # since Triton 3.4
LOG2_E = 1.4426950408889634
L2_BYTES = 24 << 20  # of keys and values of the heads that run at a time
LARGEST_OFFSET = 1 << 31  # of 32 bits, inside of a tile
NO_BIAS, SHOWS, ADDS = range(3)
_LOG2_E = tl.constexpr(LOG2_E)
_SHOWS, _ADDS = tl.constexpr(SHOWS), tl.constexpr(ADDS)
_LEAST = tl.constexpr(-3.0e38)  # a bias of the least float stays finite in powers of 2


@triton.jit
def _load_tile(tile, inside, real, EDGE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile of keys or values; zeros outside of the keys, in an edge tile, and in the columns that pad a head."""
    if EDGE:
        return tl.load(tile, mask=inside & real, other=0.0)
    if PADDED:
        return tl.load(tile, mask=real, other=0.0)
    return tl.load(tile)


@triton.jit
def _seen(keys, low, high, shown, inside, LOWER: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which keys [BLOCK_M, BLOCK_N] of a tile at an edge each query sees."""
    seen = keys[None, :] < high[:, None]
    if LOWER:
        seen = seen & (keys[None, :] >= low[:, None])
    if BIAS == _SHOWS:
        seen = seen & (tl.load(shown, mask=inside[None, :], other=0) != 0)
    return seen


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    queries, key_tile, bias_tile, seen, inside, scale, cap, CAP: tl.constexpr, BIAS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N], minus infinity where not seen. With a cap or an added bias they are in units of
    log2; else they are not scaled yet."""
    s = tl.dot(queries, key_tile, input_precision="ieee")
    if CAP:  # cap tanh(x) = cap - 2 cap / (exp(2 x) + 1); scale is that of 2 x
        s = cap - 2.0 * cap / (tl.exp2(s * scale) + 1.0)
    if BIAS == _ADDS:
        added = tl.load(bias_tile, mask=inside[None, :], other=0.0) if EDGE else tl.load(bias_tile)
        added = added.to(tl.float32)
        added = tl.where(added == float("-inf"), added, tl.maximum(added * _LOG2_E, _LEAST))
        s = s + added if CAP else s * scale + added
    return tl.where(seen, s, float("-inf")) if EDGE else s


@triton.jit
def _over(  # type: ignore[no-untyped-def]
    sums, most, total, before, begin, start, stop, queries, keys_of, values_of, bias_of, low, high, first, last,
    batch, kv, scale, cap, k_n, v_n, bias_n, SIZE: tl.constexpr, LOWER: tl.constexpr, GAPS: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of values, the largest scores and the sums of exponentials, with those of the keys from start to stop.

    EDGE: of tiles with keys that some query does not see, `before` of them from begin on. One loop for both ends keeps
    the code short.
    """
    columns, ahead = tl.arange(0, queries.shape[1]), tl.arange(0, BLOCK_N)
    real = columns < SIZE
    PADDED: tl.constexpr = queries.shape[1] > SIZE
    for at in tl.range(start - before * BLOCK_N, stop, BLOCK_N):
        if EDGE and LOWER:
            at = tl.where(at < start, at - start + before * BLOCK_N + begin, at)
        keys, far = at + ahead, tl.cast(at, tl.int64)
        inside, seen = (keys >= first) & (keys < last), low < 0
        if EDGE:
            seen = _seen(keys, low, high, bias_of + far * bias_n, inside, LOWER, BIAS)
        if TMA:  # zeros beyond the last key and the last column
            key_tile = tl.reshape(keys_of.load([batch, kv, at, 0]), (BLOCK_N, queries.shape[1])).T
            values = tl.reshape(values_of.load([batch, kv, at, 0]), (BLOCK_N, queries.shape[1]))
        else:
            key_tile = _load_tile(keys_of + far * k_n, inside[None, :], real[:, None], EDGE, PADDED)
            values = _load_tile(values_of + far * v_n, inside[:, None], real[None, :], EDGE, PADDED)
        s = _scores(queries, key_tile, bias_of + far * bias_n, seen, inside, scale, cap, CAP, BIAS, EDGE)
        times: tl.constexpr = CAP or BIAS == _ADDS
        larger = tl.maximum(most, tl.max(s, axis=1) if times else tl.max(s, axis=1) * scale)
        known = tl.where(larger == float("-inf"), 0.0, larger) if EDGE or BIAS == _ADDS else larger
        p = tl.exp2(s - known[:, None] if times else s * scale - known[:, None])
        if EDGE and GAPS:  # values that no query sees may be NaN, which a probability of 0 would not hide
            values = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], values, 0.0)
        smaller = tl.exp2(most - known)
        total = total * smaller + tl.sum(p, axis=1)
        sums = tl.dot(p.to(values.dtype), values, sums * smaller[:, None], input_precision="ieee")
        most = larger
    return sums, most, total


@triton.jit
def _place(length, heads, blocks, section):  # type: ignore[no-untyped-def]
    """Row block, batch and head of a program. Among `section` heads at a time the last blocks come first."""
    program = tl.program_id(0)
    part, inside = program // (section * blocks), program % (section * blocks)
    width = tl.minimum(section, tl.num_programs(0) // blocks - part * section)
    which = part * section + inside % width
    return blocks - 1 - inside // width, which // heads, which % heads


@triton.jit
def _limits(  # type: ignore[no-untyped-def]
    ranges, batch, start, row, length, keys, window,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Keys low <= j < high of each query; from first to last of any, and from all_low to all_high of every one."""
    low = row * 0
    if RANGES:
        place = ranges + (batch.to(tl.int64) * length + row) * 2
        low, high = tl.maximum(tl.load(place), 0), tl.minimum(tl.load(place + 1), keys)
        if WINDOW:
            low = tl.maximum(low, high - window)
        first, last = tl.min(tl.where(low < high, low, keys)), tl.max(tl.where(low < high, high, 0))
        all_low, all_high = tl.max(low), tl.min(high)
    elif CAUSAL:
        high, first, all_low = row + 1 + keys - length, 0, 0
        all_high, last = start + 1 + keys - length, tl.minimum(start + BLOCK_M, length) + keys - length
        if WINDOW:
            low = tl.maximum(high - window, 0)
            first, all_low = tl.maximum(all_high - window, 0), tl.maximum(last - window, 0)
    else:
        high, first, last, all_low, all_high = low + keys, 0, keys, 0, keys
    return low, high, first, last, all_low, all_high


@triton.jit
def _parts(  # type: ignore[no-untyped-def]
    first, all_low, all_high, LOWER: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Where tiles begin, and from where to where every query sees them whole."""
    begin, inner, outer = first // BLOCK_N * BLOCK_N, 0, all_high // BLOCK_N * BLOCK_N
    if LOWER:
        inner = tl.maximum(tl.cdiv(all_low, BLOCK_N) * BLOCK_N, begin)
    if LOWER or BIAS == _SHOWS:  # where no tile is seen whole, all of them are edge tiles
        whole = outer > inner if BIAS != _SHOWS else False
        inner, outer = tl.where(whole, inner, begin), tl.where(whole, outer, begin)
    return begin, inner, outer


@triton.jit(do_not_specialize=["length", "keys", "heads", "group", "blocks", "section", "window"])
def attend(  # type: ignore[no-untyped-def]
    q, k, v, ranges, bias, sinks, y, length, keys, heads, group, blocks, section, window, scale, cap,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, bias_b, bias_h, bias_m, bias_n,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr,
    CAP: tl.constexpr, TMA: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    block, batch, head = _place(length, heads, blocks, section)
    top, rows, columns, ahead = block * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, WIDE), tl.arange(0, BLOCK_N)
    row = tl.minimum(top + rows, length - 1)  # rows beyond the last repeat it, and are not stored
    low, high, first, last, all_low, all_high = _limits(
        ranges, batch, top, row, length, keys, window, RANGES, CAUSAL, WINDOW, BLOCK_M
    )
    near, far, of, kv = row - top, top.to(tl.int64), batch.to(tl.int64), (head // group).to(tl.int64)
    q_tile = q + of * q_b + head.to(tl.int64) * q_h + far * q_m + (near[:, None] * q_m + columns[None, :])
    queries = tl.load(q_tile, mask=(columns < SIZE)[None, :], other=0.0)
    keys_of, values_of = k, v
    if not TMA:
        keys_of += of * k_b + kv * k_h + (ahead[None, :] * k_n + columns[:, None])
        values_of += of * v_b + kv * v_h + (ahead[:, None] * v_n + columns[None, :])
    bias_of = bias + of * bias_b + head.to(tl.int64) * bias_h + far * bias_m
    bias_of += near[:, None] * bias_m + ahead[None, :] * bias_n if BIAS else 0
    sums = tl.zeros([BLOCK_M, WIDE], tl.float32)
    most, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        most, total = total + tl.load(sinks + head).to(tl.float32) * _LOG2_E, total + 1.0
    LOWER: tl.constexpr = RANGES or WINDOW
    begin, inner, outer = _parts(first, all_low, all_high, LOWER, BIAS, BLOCK_N)
    for edge in tl.static_range(1 if BIAS == _SHOWS else 0, 2):
        start, stop, more = outer if edge else inner, last if edge else outer, (inner - begin) // BLOCK_N if edge else 0
        if stop > start - more * BLOCK_N:  # or ptxas serialises the products of a loop that may have no iteration
            sums, most, total = _over(
                sums, most, total, more, begin, start, stop,
                queries, keys_of, values_of, bias_of, low, high, first, last, batch, head // group, scale, cap,
                k_n, v_n, bias_n, SIZE, LOWER, RANGES or BIAS == _SHOWS, BIAS, CAP, TMA, edge == 1, BLOCK_N,
            )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out = y + ((of * length + far) * heads + head) * SIZE + (near[:, None] * heads * SIZE + columns[None, :])
    tl.store(out, sums.to(y.dtype.element_ty), mask=(top + rows < length)[:, None] & (columns < SIZE)[None, :])


def _rows(one: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension, and rows near enough to each other for 32 bits inside a tile."""
    far = one.stride(-1) != 1 or one.stride(-2) * 256 >= LARGEST_OFFSET
    return one.contiguous() if far else one


def _bias(q: Tensor, bias: Tensor | None, keys: int) -> tuple[int, Tensor, tuple[int, ...]]:
    """The kind of a bias, the bias as the kernel takes it, and its strides."""
    if bias is None:
        return NO_BIAS, q, (0,) * 4
    spread = bias.expand(*q.shape[:3], keys)
    if bias.dtype != torch.bool:
        return ADDS, spread, spread.stride()
    return SHOWS, spread.view(torch.uint8), spread.stride()


def _descriptors(k: Tensor, v: Tensor, tile: Tile) -> tuple[Any, Any] | None:
    """k and v as descriptors of tiles, for Hopper's TMA; None where their places are no multiples of 16 bytes."""
    places = [one.data_ptr() for one in (k, v)] + [at * one.element_size() for one in (k, v) for at in one.stride()[:3]]
    if not tile.tma or not DESCRIPTORS or any(place % 16 or not place for place in places):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, 1, tile.n, padded(k.shape[3])]
    return tuple(TensorDescriptor(one, list(one.shape), list(one.stride()), block) for one in (k, v))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
    *, configuration: Tile | None = None,
) -> Tensor:  # fmt: skip
    """As the operation. configuration: the tile to use, in place of the table's."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    (b, heads, length, size), (_, kv_heads, keys, _) = q.shape, k.shape
    y = q.new_empty((b, length, heads, size))
    if not y.numel():
        return y
    masks = "bias" if bias is not None else "" if ranges is None else "ranges"
    tile = configuration or chosen(probe(q.device), size, q.dtype, causal, length, masks)
    blocks, group = cdiv(length, tile.m), heads // kv_heads
    section = group * max(1, L2_BYTES // (2 * keys * size * q.element_size()))
    kind, shown, strides = _bias(q, bias, keys)
    scale, cap, limited = scaling * LOG2_E, softcap * LOG2_E, 0 < window < keys
    # TMA loads whole tiles, hidden keys among them: only where each key of the call is seen
    tiled = None if ranges is not None or kind or limited else _descriptors(k, v, tile)
    with on(q):
        attend[(blocks * b * heads,)](
            q, *(tiled or (k, v)), q if ranges is None else ranges.contiguous(), shown,
            q if sinks is None else sinks.contiguous(), y, length, keys, heads, group, blocks, min(section, b * heads),
            window, 2 * scale / softcap if softcap else scale, cap,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides,
            ranges is not None, causal, limited, kind, sinks is not None, softcap > 0, tiled is not None,
            size, padded(size), tile.m, tile.n, **tile.options(),
        )  # fmt: skip
    return y
