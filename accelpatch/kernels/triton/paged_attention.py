"""Attention of several texts' new tokens over pages; see ../ops/attention/paged_attention.py.

A program has BLOCK_Q new tokens of one text for all query heads of a KV head, and goes over the text's cached tokens by
their index, then over its new ones, with a running softmax. Programs are numbered through all texts: those of text i
begin at queries[i] // BLOCK_Q + i, so that their number depends on T and B alone and a captured graph may hold the
launch; a text that leaves its last programs without tokens ends them. Exponentials are powers of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accelpatch.kernels.paged_rows import PagedRows
from accelpatch.kernels.triton.flash_tiles import padded
from accelpatch.kernels.triton.launch import cdiv, on

LOG2_E = 1.4426950408889634
LEAST_ROWS, KEYS = 16, 32  # of a tile; a matrix instruction takes 16 rows
FEW_TOKENS, MANY_TOKENS = 1, 16  # of a program, where each text has one and where some have more
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _text_of(queries, texts, program, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last text whose programs begin at `program` or before."""
    low, high = 0, texts
    while low < high:
        middle = (low + high) // 2
        begins = tl.load(queries + middle) // BLOCK_Q + middle
        if begins <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    sums, most, total, k_tile, v_tile, there, tokens, seen, scale, cap, SIZE: tl.constexpr, CAP: tl.constexpr
):
    """The sums of values, the largest scores and the sums of exponentials, with those of one tile of keys, at k_tile
    [WIDE, BLOCK_N] and v_tile[BLOCK_N, WIDE] where there[BLOCK_N]."""
    real = tl.arange(0, tokens.shape[1]) < SIZE
    key_tile = tl.load(k_tile, mask=real[:, None] & there[None, :], other=0.0)
    value = tl.load(v_tile, mask=there[:, None] & real[None, :], other=0.0)
    s = tl.dot(tokens, key_tile, input_precision="ieee") * scale
    if CAP:  # cap tanh(x) = cap - 2 cap / (exp(2 x) + 1); scale is that of 2 x
        s = cap - 2.0 * cap / (tl.exp2(s) + 1.0)
    s = tl.where(seen & there[None, :], s, float("-inf"))
    larger = tl.maximum(most, tl.max(s, axis=1))
    known = tl.where(larger == float("-inf"), 0.0, larger)
    p, smaller = tl.exp2(s - known[:, None]), tl.exp2(most - known)
    sums = tl.dot(p.to(value.dtype), value, sums * smaller[:, None], input_precision="ieee")
    return sums, larger, total * smaller + tl.sum(p, axis=1)


@triton.jit
def _cached(  # type: ignore[no-untyped-def]
    sums, most, total, keys, values, index, past, token, top, tokens, inside, window, stride, scale, cap,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With the cached tokens, which lie at index[past] in keys and values of one head, `stride` apart."""
    start, columns = 0, tl.arange(0, tokens.shape[1])
    if WINDOW:
        start = tl.maximum(past + top + 1 - window, 0) // BLOCK_N * BLOCK_N
    for at in tl.range(start, past, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        there = key < past
        where = tl.load(index + key, mask=there, other=0) * stride
        seen = inside[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > past + token[:, None] - window)
        k_tile, v_tile = keys + where[None, :] + columns[:, None], values + where[:, None] + columns[None, :]
        sums, most, total = _tile(sums, most, total, k_tile, v_tile, there, tokens, seen, scale, cap, SIZE, CAP)
    return sums, most, total


@triton.jit
def _own(  # type: ignore[no-untyped-def]
    sums, most, total, k, v, last, token, top, tokens, inside, window, k_t, v_t, scale, cap,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With the text's new tokens 0 .. last - 1, each up to itself."""
    start, columns = 0, tl.arange(0, tokens.shape[1])
    if WINDOW:
        start = tl.maximum(top + 1 - window, 0) // BLOCK_N * BLOCK_N
    for at in tl.range(start, last, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        far = key.to(tl.int64)
        seen = (key[None, :] <= token[:, None]) & inside[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > token[:, None] - window)
        k_tile = k + far[None, :] * k_t + columns[:, None]
        v_tile = v + far[:, None] * v_t + columns[None, :]
        sums, most, total = _tile(sums, most, total, k_tile, v_tile, key < last, tokens, seen, scale, cap, SIZE, CAP)
    return sums, most, total


@triton.jit(do_not_specialize=["texts", "kv_heads", "window"])
def attend(  # type: ignore[no-untyped-def]
    q, k, v, keys, values, queries_at, keys_at, index, sinks, y, texts, kv_heads, window, scale, cap,
    q_t, q_h, k_t, k_h, v_t, v_h, INDEXED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(1).to(tl.int64)
    text = _text_of(queries_at, texts, tl.program_id(0), BLOCK_Q)
    first = tl.load(queries_at + text)
    count, top = tl.load(queries_at + text + 1) - first, (tl.program_id(0) - (first // BLOCK_Q + text)) * BLOCK_Q
    if top >= count:
        return
    row, columns = tl.arange(0, ROWS), tl.arange(0, WIDE)
    token, head = top + row // GROUP, kv * GROUP + row % GROUP
    inside, place = (row < BLOCK_Q * GROUP) & (token < count), (first + token).to(tl.int64)
    both = inside[:, None] & (columns < SIZE)[None, :]
    tokens = tl.load(q + place[:, None] * q_t + head[:, None] * q_h + columns[None, :], mask=both, other=0.0)
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    most, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if SINKS:
        most, total = tl.load(sinks + head).to(tl.float32) * _LOG2_E, total + 1.0
    if INDEXED:
        begin = tl.load(keys_at + text)
        past, stride = tl.load(keys_at + text + 1) - begin - count, kv_heads * SIZE
        sums, most, total = _cached(
            sums, most, total, keys + kv * SIZE, values + kv * SIZE, index + begin, past, token, top, tokens, inside,
            window, stride, scale, cap, WINDOW, SIZE, CAP, BLOCK_N,
        )  # fmt: skip
    k_own, v_own = k + first.to(tl.int64) * k_t + kv * k_h, v + first.to(tl.int64) * v_t + kv * v_h
    sums, most, total = _own(
        sums, most, total, k_own, v_own, tl.minimum(top + BLOCK_Q, count), token, top, tokens, inside, window, k_t, v_t,
        scale, cap, WINDOW, SIZE, CAP, BLOCK_N,
    )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out = y + (place[:, None] * (kv_heads * GROUP) + head[:, None]) * SIZE + columns[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=both)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[T, Hq, D] as the operation; writes nothing into keys and values. Rows behind the last text are zeros."""
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    y = q.new_zeros((tokens, heads, size))
    texts, group = rows.queries.shape[0] - 1, heads // kv_heads
    if not tokens or not texts:
        return y
    block = FEW_TOKENS if rows.longest == 1 else MANY_TOKENS
    tile = max(LEAST_ROWS, 1 << (block * group - 1).bit_length())
    scale, indexed = scaling * LOG2_E, rows.index.numel() > 0
    with on(q):
        attend[(cdiv(tokens, block) + texts, kv_heads)](
            q, k, v, keys, values, rows.queries, rows.keys, rows.index if indexed else rows.write,
            q if sinks is None else sinks.contiguous(), y, texts, kv_heads, window,
            2 * scale / softcap if softcap else scale, softcap * LOG2_E,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], indexed, window > 0, softcap > 0, sinks is not None,
            group, size, padded(size), block, tile, KEYS, num_warps=4 if tile > LEAST_ROWS else 2, num_stages=2,
        )  # fmt: skip
    return y
