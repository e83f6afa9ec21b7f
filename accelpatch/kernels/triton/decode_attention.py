"""The query heads of one cached head over a run of slots by one program; see ../decode_attention.py.

A program holds ROWS queries, (token, head of the group) in turn, so that they share one read of keys and values. Runs
are counted from the first slot of the row's own tokens, and the last program of a head to finish adds their results up
in the order of their slots: nothing that is added up depends on how many tokens or rows there are, nor on who is last.
The next kernel may begin meanwhile where the device has dependent launches (Hopper and later).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError
from triton.language.extra import cuda

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.decode_attention import MOST, AttentionShape
from accelpatch.kernels.triton.launch import on

RUN = 256  # slots of one program
SLOTS = 64  # at once
ROWS = 16  # queries of one program: the least that matrix instructions take
WARPS = 4
LOG2_E = 1.4426950408889634


@triton.jit
def _cos_sin(angle):  # type: ignore[no-untyped-def]
    """Of float32 radians, without the branches of the library's, which a tile of them would spread over all registers.

    Quarter turns are taken off in three parts (Cody and Waite 1980); the polynomials are those of Moshier's Cephes.
    """
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = angle - quarters * 1.5703125
    x = x - quarters * 4.837512969970703125e-4
    x = x - quarters * 7.54978995489188216e-8
    z = x * x
    sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    turn = quarters.to(tl.int32) & 3
    swapped, down, left = (turn & 1) == 1, turn >= 2, (turn == 1) | (turn == 2)
    some, other = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where(left, -some, some), tl.where(down, -other, other)


@triton.jit
def _angles(position, inv_freq, scaling, columns, TURNED: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine [rows, columns], rounded to the activations' dtype."""
    frequency = tl.load(inv_freq + columns % (TURNED // 2)).to(tl.float32)
    cos, sin = _cos_sin(position.to(tl.float32)[:, None] * frequency[None, :])
    return (cos * scaling).to(kind).to(tl.float32), (sin * scaling).to(kind).to(tl.float32)


@triton.jit
def _normed(value, factor, weight, kind: tl.constexpr, PLUS_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    wide = value.to(tl.float32) * factor[:, None]
    if PLUS_ONE:
        return (wide * (weight.to(tl.float32) + 1.0)[None, :]).to(kind)
    return (wide.to(kind).to(tl.float32) * weight.to(tl.float32)[None, :]).to(kind)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, here, columns, cos, sin, weight, eps,
    SIZE: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Heads' rows of q or k: normalised where NORM, then turned; rounded to their dtype where transformers rounds."""
    low, moved = columns < TURNED // 2, columns < TURNED
    others = tl.where(low, columns + TURNED // 2, tl.where(moved, columns - TURNED // 2, columns))
    inside = columns < SIZE
    both = here[:, None] & inside[None, :]
    value = tl.load(x[:, None] + columns[None, :], mask=both, other=0.0)
    other = tl.load(x[:, None] + others[None, :], mask=both, other=0.0)
    kind: tl.constexpr = x.dtype.element_ty
    if NORM:
        wide = value.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
        value = _normed(value, factor, tl.load(weight + columns, mask=inside, other=0.0), kind, PLUS_ONE)
        other = _normed(other, factor, tl.load(weight + others, mask=inside, other=0.0), kind, PLUS_ONE)
    straight = (value.to(tl.float32) * cos).to(kind).to(tl.float32)
    across = (other.to(tl.float32) * sin).to(kind).to(tl.float32)
    done = (straight + tl.where(low[None, :], -across, across)).to(kind)
    return tl.where(moved[None, :], done, value)


@triton.jit
def _cache_new(  # type: ignore[no-untyped-def]
    given, positions, inv_freq, k_norm, keys, values, slot, tokens, begin, stop, heads, kv_heads, rope_scaling, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Writes the k and v of the new tokens whose slots are in this run; `given` begins at the first token's k."""
    token, columns = tl.arange(0, MOST), tl.arange(0, WIDE)
    here = (token < tokens) & (slot + token >= begin) & (slot + token < stop)
    position = tl.load(positions + token, mask=here, other=0)
    cos, sin = _angles(position, inv_freq, rope_scaling, columns, TURNED, given.dtype.element_ty)
    rows = given + token * ((heads + 2 * kv_heads) * SIZE)
    k = _turned(rows, here, columns, cos, sin, k_norm, eps, SIZE, TURNED, NORM, PLUS_ONE)
    both = here[:, None] & (columns < SIZE)[None, :]
    v = tl.load((rows + kv_heads * SIZE)[:, None] + columns[None, :], mask=both, other=0.0)
    place = (slot + token)[:, None] * SIZE + columns[None, :]
    tl.store(keys + place, k, mask=both)
    tl.store(values + place, v, mask=both)


@triton.jit
def _scores(q, k, scaling, softcap, seen, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """To the base 2; minus infinity where not seen."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if CAP:  # scaling is 2 log2(e) / softcap times the scores' own then: tanh(x) = 1 - 2 / (e^2x + 1)
        score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    q, keys, values, mask, begin, stop, own, slot, end, window, scaling, softcap,
    CAP: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The running softmax (highest score, sum of weights, weighted sum of values) over the slots begin .. stop - 1."""
    columns = tl.arange(0, WIDE)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDE], tl.float32)
    least = tl.where(window > 0, own - window, -1)  # a token sees what lies behind this slot
    for start in tl.range(begin, stop, SLOTS, num_stages=1):
        at = start + tl.arange(0, SLOTS)
        here = (at >= 0) & (at < end)
        given = here & ((at >= slot) | (tl.load(mask + at, mask=here & (at < slot), other=0) != 0))
        both = given[:, None] & (columns < SIZE)[None, :]  # what hidden slots hold must not matter
        k = tl.load(keys + at[:, None] * SIZE + columns[None, :], mask=both, other=0.0)
        v = tl.load(values + at[:, None] * SIZE + columns[None, :], mask=both, other=0.0)
        seen = given[None, :] & (at[None, :] <= own[:, None]) & (at[None, :] > least[:, None])
        score = _scores(q, k, scaling, softcap, seen, CAP)
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing was seen yet
        weight, kept = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        mean = mean * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weight, axis=1)
        top = higher
    return top, total, mean


@triton.jit
def _added_up(sums, tops, first, last, here, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weighted mean of the values over the runs first .. last, one after the other."""
    row, columns = tl.arange(0, ROWS), tl.arange(0, WIDE)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for run in tl.range(first, last + 1, num_stages=1):
        highest = tl.maximum(highest, tl.load(tops + run * 2 * ROWS + row))
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    both = here[:, None] & (columns < SIZE)[None, :]
    for run in tl.range(first, last + 1, num_stages=1):
        kept = tl.exp2(tl.load(tops + run * 2 * ROWS + row) - highest)
        total += kept * tl.load(tops + (run * 2 + 1) * ROWS + row)
        held = run * ROWS * SIZE + row[:, None] * SIZE + columns[None, :]
        mean += kept[:, None] * tl.load(sums + held, mask=both, other=0.0)
    return mean / total[:, None]


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    out, sums, tops, finished, top, total, mean, run, first, last, here,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A run's result: alone it is the head's; else the last program to come here adds all of them up."""
    row, columns = tl.arange(0, ROWS), tl.arange(0, WIDE)
    both = here[:, None] & (columns < SIZE)[None, :]
    if first == last:
        tl.store(out, (mean / total[:, None]).to(out.dtype.element_ty), mask=both)
    else:
        tl.store(sums + run * ROWS * SIZE + row[:, None] * SIZE + columns[None, :], mean, mask=both)
        tl.store(tops + run * 2 * ROWS + row, top)
        tl.store(tops + (run * 2 + 1) * ROWS + row, total)
        tl.debug_barrier()  # all of the program's stores, then one thread's count of them
        if tl.atomic_add(finished, 1, sem="acq_rel") == last - first:
            tl.debug_barrier()
            tl.store(finished, 0)  # for the next launch
            mean = _added_up(sums, tops, first, last, here, SIZE, WIDE, ROWS)
            tl.store(out, mean.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["tokens"])
def _attend(  # type: ignore[no-untyped-def]
    qkv, positions, slot_at, mask, keys, values, inv_freq, q_norm, k_norm, y, sums, tops, finished,
    tokens, capacity, heads, window, scaling, softcap, rope_scaling, eps,
    GROUP: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, CAP: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # `tokens` is no constant: one and eight of them run the same instructions
    run, row, kv_heads = tl.program_id(0), tl.program_id(2).to(tl.int64), heads // GROUP
    tiles = tl.cdiv(tokens * GROUP, ROWS)
    kv, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    slot = tl.load(slot_at).to(tl.int32)
    start = slot - tl.load(positions + row * tokens).to(tl.int32)  # of the row's own tokens
    shift = (RUN - tl.where((start < 0) | (start > slot), 0, start) % RUN) % RUN
    first = (tl.where(window > 0, tl.maximum(slot + 1 - window, 0), 0) + shift) // RUN
    last = (slot + tokens - 1 + shift) // RUN
    if (run >= first) & (run <= last):
        begin, query = run * RUN - shift, tile * ROWS + tl.arange(0, ROWS)
        token, head, here = query // GROUP, kv * GROUP + query % GROUP, query < tokens * GROUP
        given, base = qkv + row * tokens * ((heads + 2 * kv_heads) * SIZE), (row * kv_heads + kv) * capacity * SIZE
        if begin + RUN > slot:
            _cache_new(
                given + (heads + kv) * SIZE, positions + row * tokens, inv_freq, k_norm, keys + base, values + base,
                slot, tokens, begin, begin + RUN, heads, kv_heads, rope_scaling, eps,
                SIZE, WIDE, TURNED, NORM, PLUS_ONE, MOST,
            )  # fmt: skip
            tl.debug_barrier()  # what was written is read below
        columns = tl.arange(0, WIDE)
        cos, sin = _angles(
            tl.load(positions + row * tokens + token, mask=here, other=0), inv_freq, rope_scaling, columns, TURNED,
            qkv.dtype.element_ty,
        )  # fmt: skip
        rows = given + token * ((heads + 2 * kv_heads) * SIZE) + head * SIZE
        q = _turned(rows, here, columns, cos, sin, q_norm, eps, SIZE, TURNED, NORM, PLUS_ONE)
        top, total, mean = _scan(
            q, keys + base, values + base, mask + row * capacity, begin, tl.minimum(begin + RUN, slot + tokens),
            slot + token, slot, slot + tokens, window, scaling, softcap, CAP, SLOTS, SIZE, WIDE, ROWS,
        )  # fmt: skip
        out = y + ((row * tokens + token) * heads + head)[:, None] * SIZE + columns[None, :]
        program = (row * kv_heads + kv) * tiles + tile
        runs = program * tl.num_programs(0)
        _leave(
            out, sums + runs * ROWS * SIZE, tops + runs * 2 * ROWS, finished + program, top, total, mean,
            run, first, last, here, SIZE, WIDE, ROWS,
        )  # fmt: skip


_finished: weakref.WeakKeyDictionary[AttentionShape, dict[int, Tensor]] = weakref.WeakKeyDictionary()


def _counters(shape: AttentionShape, count: int, device: torch.device) -> Tensor:
    """Zeros, one for each head that is added up. A launch leaves them as they were, so each layer keeps its own.

    They stay where they are: captured launches know them by their address.
    """
    held = _finished.setdefault(shape, {})
    if count not in held:
        held[count] = torch.zeros(count, dtype=torch.int32, device=device)
    return held[count]


def decode_attention_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
) -> Tensor:
    """As the operation; qkv, positions, mask and the cache contiguous."""
    (rows, tokens), capacity, group = positions.shape, keys.shape[2], shape.heads // shape.kv_heads
    y = qkv.new_empty(*qkv.shape[:-1], shape.heads * shape.size)
    runs, tiles = triton.cdiv(capacity, RUN) + 1, triton.cdiv(tokens * group, ROWS)
    programs = rows * shape.kv_heads * tiles
    sums = qkv.new_empty((programs, runs, ROWS, shape.size), dtype=torch.float32)
    tops = qkv.new_empty((programs, runs, 2, ROWS), dtype=torch.float32)
    norms = (qkv if shape.q_norm is None else shape.q_norm, qkv if shape.k_norm is None else shape.k_norm)
    cap = shape.softcap > 0
    scaling = shape.scaling * LOG2_E * (2 / shape.softcap if cap else 1)
    dependent, options = _dependent(qkv)
    with on(qkv), _said():
        _attend[(runs, shape.kv_heads * tiles, rows)](
            qkv, positions, slot, mask, keys, values, shape.inv_freq, *norms, y, sums, tops,
            _counters(shape, programs, qkv.device),
            tokens, capacity, shape.heads, shape.window, scaling, shape.softcap * LOG2_E, shape.rope_scaling, shape.eps,
            group, shape.q_norm is not None, shape.plus_one, cap, shape.size, triton.next_power_of_2(shape.size),
            shape.turned, RUN, SLOTS, ROWS, MOST, dependent, num_warps=WARPS, **options,
        )  # fmt: skip
    return y


@contextmanager
def _said() -> Iterator[None]:
    """Triton's compile errors as ours."""
    try:
        yield
    except TritonError as error:
        raise KernelError(f"decode_attention: Triton cannot compile it here: {error}") from error


def _dependent(tensor: Tensor) -> tuple[bool, dict[str, Any]]:
    """Whether kernels may begin before the one before them ends, and the launch's options for it."""
    arch = probe(tensor.device).arch if tensor.is_cuda else ""
    return (True, {"launch_pdl": True}) if arch.startswith("sm_") and int(arch[3:].rstrip("a")) >= 90 else (False, {})
