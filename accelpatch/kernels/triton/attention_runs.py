"""The runs of slots that programs of decode_attention.py take, and how their results are added up."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def runs_of(slot_at, position, tokens, window, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """slot, the first slot of the row's own tokens, the first one that any of them sees, and the runs of these."""
    slot = tl.load(slot_at).to(tl.int32)
    own = slot - tl.load(position).to(tl.int32)
    own = tl.where((own < 0) | (own > slot), 0, own)  # positions that count something else
    low = tl.where(window > 0, tl.maximum(slot + 1 - window, 0), 0)
    return slot, own, low, tl.maximum(low - own, 0) // RUN, (slot + tokens - 1 - own) // RUN


@triton.jit
def count_of(mask, low, high, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the slots low .. high - 1 hold tokens."""
    count = 0
    for start in tl.range(low, high, ROOM, num_stages=1):
        at = start + tl.arange(0, ROOM)
        count += tl.sum((tl.load(mask + at, mask=at < high, other=0) != 0).to(tl.int32), axis=0)
    return count


@triton.jit
def begin_of(mask, run, own, low, RUN: tl.constexpr, SLOTS: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a run's first block begins: blocks are counted from `own`, and those that nothing is seen in left out."""
    begin = own + run * RUN
    if low >= own:
        begin += tl.maximum(low - begin, 0) // SLOTS * SLOTS
    elif count_of(mask, low, tl.where(run == 0, own, low), ROOM) > 0:
        begin -= tl.cdiv(own - low, SLOTS) * SLOTS
    return begin


@triton.jit
def prefetch(x, count, WIDE: tl.constexpr, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks for the first `count` numbers at x, of a run's at most, to be brought into the level-2 cache."""
    number: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    at = tl.arange(0, RUN * WIDE // number) * number
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
        [(x + at).to(tl.int64), (at < count).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def added_up(  # type: ignore[no-untyped-def]
    sums, tops, rows, here, first, last,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the values of rows[SOME] over the runs first .. last, one after the other."""
    columns, ahead = tl.arange(0, WIDE), tl.arange(0, AHEAD)
    both = here[:, None] & (columns < SIZE)[None, :]
    highest = tl.full([SOME], float("-inf"), tl.float32)
    for start in tl.range(first, last + 1, AHEAD, num_stages=1):
        run = start + ahead
        held = tops + run[:, None] * (2 * ROWS) + rows[None, :]
        some = tl.load(held, mask=(run <= last)[:, None], other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, tl.max(some, axis=0))
    total, mean = tl.zeros([SOME], tl.float32), tl.zeros([SOME, WIDE], tl.float32)
    for start in tl.range(first, last + 1, AHEAD, num_stages=1):
        for step in tl.static_range(AHEAD):
            run = start + step
            used = here & (rows * 0 + run <= last)
            top = tl.load(tops + run * 2 * ROWS + rows, mask=used, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(tops + (run * 2 + 1) * ROWS + rows, mask=used, other=0.0, cache_modifier=".cg")
            held = sums + (run * ROWS + rows)[:, None] * SIZE + columns[None, :]
            value = tl.load(held, mask=both & used[:, None], other=0.0, cache_modifier=".cg")
            kept = tl.where(used, tl.exp2(top - highest), 0.0)
            total = tl.fma(kept, part, total)
            mean = tl.fma(tl.broadcast_to(kept[:, None], [SOME, WIDE]), value, mean)
    return mean / total[:, None]
