"""Decode attention: one program computes the query heads of one KV head over some KV splits; see
../ops/attention/decode_attention.py.

A program holds ROWS queries, (token, head of the group), which share one read of keys and values. Splits are counted
from the first slot of the row's own tokens (the first split includes what lies before). There are as many programs as
fit the GPU at once, each with some splits of a head, and the last program of a head to finish reduces them. Each split
starts with a fresh softmax state and has a fixed place in the reduction: a token's result depends on its slots alone,
not on the number of tokens, rows or programs, nor on which one finishes last.

Programmatic dependent launch (Hopper and later): the next kernel may start meanwhile. Before it waits for the kernel
before it, which writes qkv only, a program reads slot, positions and mask, and prefetches its first keys and values
into the L2 cache: a hint, so it does not matter who wrote them. If all kernels used early launch, ones further back
could still be running then. A kernel without it (any of torch's) starts after all before it have ended, and ends before
any after it starts. So one of those must lie between a write to slot, positions or mask and the next launch. All else
is read, and everything written, after the wait, when all earlier kernels have ended: each kernel ends after its own
wait.

The GEMM after this kernel has one block per SM and prefetches its weights. An SM has room for a program of this kernel
and one such block, but not for two blocks. So a launch has a program for every SM, and programs without work stay until
the wait is over: an SM without a program would be given several of that GEMM's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from accelpatch.errors import KernelError
from accelpatch.kernels.attention_shape import MAX_NEW_TOKENS, AttentionShape
from accelpatch.kernels.layouts.kv_states import States
from accelpatch.kernels.triton import launch
from accelpatch.kernels.triton.attention_runs import added_up, begin_of, count_of, keep, prefetch, runs_of
from accelpatch.kernels.triton.cache_codes import cache_new, decoded, pointers, scales_at, weighted
from accelpatch.kernels.triton.dependent_launch import release, wait
from accelpatch.kernels.triton.launch import cdiv
from accelpatch.kernels.triton.rotation import angles, pair, rotated

RUN = 256  # slots whose results are added up by themselves
ROWS = 16  # queries of one program: the least that matrix instructions take
ROOM = 512  # mask entries read at once
AHEAD = 32  # runs whose results are read together
LOG2_E = 1.4426950408889634
LOG2 = tl.constexpr(LOG2_E)  # as kernels see it


SLOTS = 64  # slots per block, of 256 bytes each (fewer where they are wider)
WARPS = 4
STAGES = 2  # pipeline stages of the loop over slots
RESIDENT = 2  # programs a processor


@triton.jit
def _scores(q, k, by, scaling, softcap, seen, CAP: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores times log2(e); minus infinity where not seen. by: the scales of codes k."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if FORM != 0:
        score = score * by[None, :]
    if CAP:  # scaling is 2 log2(e) / softcap times the scores' own then: tanh(x) = 1 - 2 / (e^2x + 1)
        score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _over(  # type: ignore[no-untyped-def]
    q, keys, values, k_scales, v_scales, mask, sums, tops, here, token, begin, stop, origin, slot, window, scaling,
    softcap,
    CAP: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Running softmax state (m, l, acc) over the slots begin .. stop - 1.

    Returns the state of the last split; those of earlier splits are stored in memory.
    """
    columns = tl.arange(0, WIDE)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDE], tl.float32)
    least = tl.where(window > 0, slot + token - window, -1)  # a token sees what lies behind this slot
    low = tl.where(window > 0, tl.maximum(slot + 1 - window, 0), 0)  # the first slot that any of them sees
    for start in tl.range(begin, stop, SLOTS, num_stages=STAGES):
        at, end = start + tl.arange(0, SLOTS), start + SLOTS
        shown = (at >= low) & (at < stop)
        if MASKED:
            shown &= (at >= slot) | (tl.load(mask + at, mask=shown, other=0) != 0)
        both = shown[:, None] & (columns < SIZE)[None, :]  # what hidden slots hold must not matter
        k = decoded(tl.load(keys + at[:, None] * SIZE + columns[None, :], mask=both, other=0), q.dtype, FORM)
        v = decoded(tl.load(values + at[:, None] * SIZE + columns[None, :], mask=both, other=0), q.dtype, FORM)
        k_by, v_by = scales_at(k_scales, at, shown, FORM), scales_at(v_scales, at, shown, FORM)
        seen = shown[None, :] & (at[None, :] <= (slot + token)[:, None]) & (at[None, :] > least[:, None])
        score = _scores(q, k, k_by, scaling, softcap, seen, CAP, FORM)
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing was seen yet
        weight, kept = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        mean = weighted(weight, v, v_by, mean, kept, seen, FORM, q.dtype)
        total = total * kept + tl.sum(weight, axis=1)
        ended = (end < stop) & (end > origin) & ((end - origin) % RUN == 0)
        if ended:
            keep(sums, tops, (start - origin) // RUN, here, higher, total, mean, SIZE, WIDE, ROWS)
        top, total = tl.where(ended, float("-inf"), higher), tl.where(ended, 0.0, total)
        mean = tl.where(ended, 0.0, mean)
    return top, total, mean


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    q, keys, values, k_scales, v_scales, mask, sums, tops, query, tokens, begin, stop, origin, slot, window, scaling,
    softcap, all_seen,
    GROUP: tl.constexpr, CAP: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """As _over; the mask is read only where some slots are masked."""
    token, here = query // GROUP, query < tokens * GROUP
    if all_seen:
        top, total, mean = _over(
            q, keys, values, k_scales, v_scales, mask, sums, tops, here, token, begin, stop, origin, slot, window,
            scaling, softcap, CAP, RUN, SLOTS, SIZE, WIDE, ROWS, STAGES, False, FORM,
        )  # fmt: skip
    else:
        top, total, mean = _over(
            q, keys, values, k_scales, v_scales, mask, sums, tops, here, token, begin, stop, origin, slot, window,
            scaling, softcap, CAP, RUN, SLOTS, SIZE, WIDE, ROWS, 1, True, FORM,
        )  # fmt: skip
    return top, total, mean


@triton.jit
def _divided(top, total, mean, sinks, here, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc / l of a softmax state, with one more term of the rows' sinks, of which sinks are the addresses."""
    if SINKS:
        sink = tl.load(sinks, mask=here, other=0.0) * LOG2
        most = tl.maximum(top, sink)
        before = tl.exp2(top - most)
        total, mean = total * before + tl.exp2(sink - most), mean * before[:, None]
    return mean / tl.where(here, total, 1.0)[:, None]


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    y, sinks, sums, tops, finished, top, total, mean, begin, queries, heads, run, first, last, programs,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    AHEAD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the head's output if there is one split; else store it, and the last program to arrive reduces all."""
    query, columns = begin + tl.arange(0, ROWS), tl.arange(0, WIDE)
    kind: tl.constexpr = y.dtype.element_ty
    if first == last:
        at = y + (query // GROUP * heads + query % GROUP)[:, None] * SIZE + columns[None, :]
        all_seen = _divided(top, total, mean, sinks + query % GROUP, query < queries, SINKS)
        tl.store(at, all_seen.to(kind), mask=(query < queries)[:, None] & (columns < SIZE)[None, :])
    else:
        keep(sums, tops, run, query < queries, top, total, mean, SIZE, WIDE, ROWS)
        tl.debug_barrier()  # all of the program's stores, then one thread's count of them
        if tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.debug_barrier()
            tl.store(finished, 0)  # for the next launch
            for start in tl.range(0, tl.minimum(queries - begin, ROWS), SOME, num_stages=1):
                rows = start + tl.arange(0, SOME)
                some = begin + rows
                here = some < queries
                most, all_, acc = added_up(sums, tops, rows, here, first, last, SIZE, WIDE, ROWS, SOME, AHEAD)
                all_of = _divided(most, all_, acc, sinks + some % GROUP, here, SINKS)
                there = y + (some // GROUP * heads + some % GROUP)[:, None] * SIZE + columns[None, :]
                tl.store(there, all_of.to(kind), mask=here[:, None] & (columns < SIZE)[None, :])


@triton.jit
def _read_ahead(  # type: ignore[no-untyped-def]
    keys, values, begin, end, RUN: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr
):
    # more at once would drive each other out where all processors are busy
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    count = tl.minimum(end - begin, tl.where(programs > 160, RUN // 2, RUN)) * SIZE
    prefetch(keys + begin * SIZE, count, WIDE, RUN)
    prefetch(values + begin * SIZE, count, WIDE, RUN)


@triton.jit
def _ready(  # type: ignore[no-untyped-def]
    qkv, positions, inv_freq, q_norm, k_norm, keys, values, k_scales, v_scales, tokens, query, kv, slot, begin, stop,
    heads, rope_scaling, eps,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr, MAX_NEW_TOKENS: tl.constexpr, DEPENDENT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Wait for the kernel before, cache the new tokens in slots begin .. stop - 1, and return the queries."""
    columns, fresh, kv_heads = tl.arange(0, WIDE), tl.arange(0, MAX_NEW_TOKENS), heads // GROUP
    token, here = query // GROUP, query < tokens * GROUP
    kind: tl.constexpr = qkv.dtype.element_ty
    cos, sin = angles(positions + token, here, inv_freq, rope_scaling, columns, ROTARY_DIM, kind)
    k_cos, k_sin = angles(positions + fresh, fresh < tokens, inv_freq, rope_scaling, columns, ROTARY_DIM, kind)
    if DEPENDENT:
        wait()
    stride = (heads + 2 * kv_heads) * SIZE
    rows = qkv + token * stride + (kv * GROUP + query % GROUP) * SIZE
    value, other, others = pair(rows, here, columns, SIZE, ROTARY_DIM)
    if stop > slot:
        new = (fresh < tokens) & (slot + fresh >= begin) & (slot + fresh < stop)
        cache_new(
            qkv + fresh * stride + (heads + kv) * SIZE, k_cos, k_sin, k_norm, keys, values, k_scales, v_scales, new,
            slot, kv_heads, eps, SIZE, WIDE, ROTARY_DIM, NORM, PLUS_ONE, MAX_NEW_TOKENS, FORM,
        )  # fmt: skip
        tl.debug_barrier()  # what was written is read by other threads
    return rotated(value, other, others, columns, cos, sin, q_norm, eps, SIZE, ROTARY_DIM, NORM, PLUS_ONE)


# `tokens` is no constant: one and eight of them run the same instructions
@triton.jit(do_not_specialize=["tokens"])
def _attend(  # type: ignore[no-untyped-def]
    qkv, positions, slot_at, mask, keys, values, k_scales, v_scales, inv_freq, q_norm, k_norm, sinks, y, sums, tops,
    finished, tokens, capacity, heads, window, scaling, softcap, rope_scaling, eps,
    GROUP: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, CAP: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, ROTARY_DIM: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    SOME: tl.constexpr, MAX_NEW_TOKENS: tl.constexpr, ROOM: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr, FORM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    tiles, row = tl.cdiv(tokens * GROUP, ROWS), tl.program_id(2).to(tl.int64)
    if DEPENDENT:
        release()
    slot, own, low, first, last, run, end, programs = runs_of(slot_at, positions + row * tokens, tokens, window, RUN)
    if tl.program_id(0) < programs:
        kv, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
        mask, head = mask + row * capacity, row * (heads // GROUP) + kv
        k_scales, v_scales, at = k_scales + head * capacity, v_scales + head * capacity, head * capacity * SIZE
        begin, stop = begin_of(mask, run, own, low, RUN, SLOTS, ROOM), tl.minimum(own + end * RUN, slot + tokens)
        cached, query = tl.minimum(slot, stop), tile * ROWS + tl.arange(0, ROWS)
        if DEPENDENT:
            _read_ahead(keys + at, values + at, begin, cached, RUN, SIZE, WIDE)
        all_seen = (begin >= 0) & (count_of(mask, begin, cached, ROOM) == cached - begin)
        q = _ready(
            qkv + row * tokens * ((heads + heads // GROUP * 2) * SIZE), positions + row * tokens, inv_freq,
            q_norm, k_norm, keys + at, values + at, k_scales, v_scales, tokens, query, kv, slot, own + run * RUN, stop,
            heads, rope_scaling, eps, GROUP, SIZE, WIDE, ROTARY_DIM, NORM, PLUS_ONE, MAX_NEW_TOKENS, DEPENDENT, FORM,
        )  # fmt: skip
        states = (head * tiles + tile) * tl.cdiv(capacity, RUN) * ROWS
        top, total, mean = _scan(
            q, keys + at, values + at, k_scales, v_scales, mask, sums + states * SIZE, tops + states * 2, query, tokens,
            begin, stop, own, slot, window, scaling, softcap, all_seen, GROUP, CAP, RUN, SLOTS, SIZE, WIDE, ROWS,
            STAGES, FORM,
        )  # fmt: skip
        _leave(
            y + (row * tokens * heads + kv * GROUP) * SIZE, sinks + kv * GROUP, sums + states * SIZE, tops + states * 2,
            finished + head * tiles + tile, top, total, mean, tile * ROWS, tokens * GROUP, heads, end - 1, first, last,
            programs, GROUP, SIZE, WIDE, ROWS, SOME, AHEAD, SINKS,
        )  # fmt: skip
    elif DEPENDENT:
        wait()


def decode_attention_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape
) -> Tensor:
    """As the operation; qkv, positions, mask and the cache must be contiguous."""
    (rows, tokens), capacity, group = positions.shape, keys.shape[2], shape.heads // shape.kv_heads
    y = qkv.new_empty(*qkv.shape[:-1], shape.heads * shape.size)
    runs, tiles = cdiv(capacity, RUN), cdiv(tokens * group, ROWS)
    heads, wide = rows * shape.kv_heads * tiles, triton.next_power_of_2(shape.size)
    sums = qkv.new_empty((heads, runs, ROWS, shape.size), dtype=torch.float32)
    tops = qkv.new_empty((heads, runs, 2, ROWS), dtype=torch.float32)
    row_bytes = wide * qkv.element_size()
    given = tuple(qkv if one is None else one for one in (shape.q_norm, shape.k_norm, shape.sinks))
    cap, (form, cache) = shape.softcap > 0, pointers(keys, values, qkv)
    scaling = shape.scaling * LOG2_E * (2 / shape.softcap if cap else 1)
    dependent, options = launch.dependent(qkv)
    processors = launch.processors(qkv.device)
    working = min(runs, max(1, processors * RESIDENT // heads))
    everywhere = cdiv(processors, heads) if dependent else 1
    with launch.on(qkv), _said():
        _attend[(max(working, everywhere), shape.kv_heads * tiles, rows)](
            qkv, positions, slot, mask, *cache, shape.inv_freq, *given, y, sums, tops,
            shape.memory.first(heads, qkv.device),
            tokens, capacity, shape.heads, shape.window, scaling, shape.softcap * LOG2_E, shape.rope_scaling, shape.eps,
            group, shape.q_norm is not None, shape.plus_one, cap, shape.size, wide, shape.rotary_dim, RUN,
            min(SLOTS, SLOTS * 256 // row_bytes), ROWS, min(ROWS, max(4, triton.next_power_of_2(group))),
            MAX_NEW_TOKENS, ROOM, AHEAD, STAGES, dependent, form, shape.sinks is not None, num_warps=WARPS, **options,
        )  # fmt: skip
    return y


@contextmanager
def _said() -> Iterator[None]:
    """Context manager: turns Triton's compile errors into KernelError."""
    try:
        yield
    except TritonError as error:
        raise KernelError(f"decode_attention: Triton cannot compile it here: {error}") from error
