"""KV splits (runs of slots) of decode_attention.py: which program takes which, and the reduction of their results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def runs_of(slot_at, position, tokens, window, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """slot; the first slot of the row's own tokens; the first slot that any token attends to; first and last split.

    Then the begin and end of this program's splits, and the number of programs that have any.
    """
    slot = tl.load(slot_at + tl.program_id(2)).to(tl.int32)
    own = slot - tl.load(position).to(tl.int32)
    # A position that is greater than the slot does not count slots: all slots are then the row's own.
    own = tl.where((own < 0) | (own > slot), 0, own)
    low = tl.where(window > 0, tl.maximum(slot + 1 - window, 0), 0)
    first, last = tl.maximum(low - own, 0) // RUN, (slot + tokens - 1 - own) // RUN
    used = last + 1 - first
    programs, program = tl.minimum(tl.num_programs(0), used), tl.program_id(0)
    begin, end = first + program * used // programs, first + (program + 1) * used // programs
    return slot, own, low, first, last, begin, end, programs


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
    """First slot of a split's first block, aligned to `own`; blocks without visible slots are skipped."""
    begin = own + run * RUN
    if low >= own:
        begin += tl.maximum(low - begin, 0) // SLOTS * SLOTS
    elif count_of(mask, low, tl.where(run == 0, own, low), ROOM) > 0:
        begin -= tl.cdiv(own - low, SLOTS) * SLOTS
    return begin


@triton.jit
def prefetch(x, count, WIDE: tl.constexpr, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch the first `count` values at x, at most one split's, into the L2 cache."""
    number: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    at = tl.arange(0, RUN * WIDE // number) * number
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
        [(x + at).to(tl.int64), (at < count).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def keep(  # type: ignore[no-untyped-def]
    sums, tops, run, here, top, total, mean, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
):
    """Store a split's partial softmax state (m, l, acc) in memory."""
    row, columns = tl.arange(0, ROWS), tl.arange(0, WIDE)
    both = here[:, None] & (columns < SIZE)[None, :]
    tl.store(sums + (run * ROWS + row)[:, None] * SIZE + columns[None, :], mean, mask=both)
    tl.store(tops + run * 2 * ROWS + row, top)
    tl.store(tops + (run * 2 + 1) * ROWS + row, total)


@triton.jit
def added_up(  # type: ignore[no-untyped-def]
    sums, tops, rows, here, first, last,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) of rows[SOME]: the reduction of their partial softmax states over the splits first .. last.

    Each split has a fixed place among the AHEAD that are reduced at once; missing ones contribute nothing.
    """
    ahead, columns = tl.arange(0, AHEAD), tl.arange(0, WIDE)
    begin = first // AHEAD * AHEAD
    highest = tl.full([SOME], float("-inf"), tl.float32)
    for start in tl.range(begin, last + 1, AHEAD, num_stages=1):
        run = start + ahead
        used = ((run >= first) & (run <= last))[:, None] & here[None, :]
        top_at = tops + run[:, None] * (2 * ROWS) + rows[None, :]
        some = tl.load(top_at, mask=used, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, tl.max(some, axis=0))
    total, mean = tl.zeros([SOME], tl.float32), tl.zeros([SOME, WIDE], tl.float32)
    for start in tl.range(begin, last + 1, AHEAD, num_stages=1):
        run = start + ahead
        used = ((run >= first) & (run <= last))[:, None] & here[None, :]
        row_at = (run * ROWS)[:, None] + rows[None, :]
        all_of = used[:, :, None] & (columns < SIZE)[None, None, :]
        value = tl.load(
            sums + row_at[:, :, None] * SIZE + columns[None, None, :], mask=all_of, other=0.0, cache_modifier=".cg"
        )
        top_at = (run * 2 * ROWS)[:, None] + rows[None, :]
        top = tl.load(tops + top_at, mask=used, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(tops + top_at + ROWS, mask=used, other=0.0, cache_modifier=".cg")
        kept = tl.where(used, tl.exp2(top - highest[None, :]), 0.0)
        total += tl.sum(kept * part, axis=0)
        mean += tl.sum(kept[:, :, None] * value, axis=0)
    return highest, total, mean
