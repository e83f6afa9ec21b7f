"""One query head of one row by one program, or a run of its cached slots; see ../decode_attention.py.

Each program makes q and the new k and v itself from the row of qkv, so that none waits for another: the new token never
comes from the cache. The next kernel may begin meanwhile where the device has dependent launches (Hopper and later).
"""

from __future__ import annotations

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
from accelpatch.kernels.decode_attention import AttentionShape
from accelpatch.kernels.triton.launch import on

SPLIT = 64  # slots of one program
BLOCK = 64  # slots at once
WARPS = 8
TOGETHER = 16  # runs of slots that are added up at once
LOG2_E = 1.4426950408889634


@triton.jit
def _turned(x, columns, half, inside, cos, sin, weight, size, eps, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A head's row of q or k: normalised where NORM, then turned; rounded to its dtype where transformers rounds."""
    low = columns < half
    others = tl.where(low, columns + half, columns - half)
    value = tl.load(x + columns, mask=inside, other=0.0)
    other = tl.load(x + others, mask=inside, other=0.0)
    kind = value.dtype
    if NORM:
        wide = value.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        value = ((wide * factor).to(kind).to(tl.float32) * scale).to(kind)
        scale = tl.load(weight + others, mask=inside, other=0.0).to(tl.float32)
        other = ((other.to(tl.float32) * factor).to(kind).to(tl.float32) * scale).to(kind)
    straight = (value.to(tl.float32) * cos).to(kind).to(tl.float32)
    across = (other.to(tl.float32) * sin).to(kind).to(tl.float32)
    return (straight + tl.where(low, -across, across)).to(kind)


@triton.jit
def _angles(position, inv_freq, scaling, inside, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine of each column, rounded to the activations' dtype."""
    angle = tl.load(position).to(tl.float32) * tl.load(inv_freq, mask=inside, other=0.0).to(tl.float32)
    return (tl.cos(angle) * scaling).to(kind).to(tl.float32), (tl.sin(angle) * scaling).to(kind).to(tl.float32)


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    keys,
    values,
    mask,
    q,
    top,
    total,
    mean,
    begin,
    stop,
    first,
    columns,
    inside,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The running softmax (highest score, sum of weights, weighted sum of values) after the slots begin..stop - 1."""
    for start in tl.range(begin, stop, SLOTS, num_stages=1):
        at = start + tl.arange(0, SLOTS)
        here = at < stop
        seen = here & (at >= first) & (tl.load(mask + at, mask=here, other=0) != 0)
        place = at[:, None] * SIZE + columns[None, :]
        both = here[:, None] & inside[None, :]
        k = tl.load(keys + place, mask=both, other=0.0).to(tl.float32)
        v = tl.load(values + place, mask=both, other=0.0).to(tl.float32)
        score = tl.where(seen, tl.sum(k * q[None, :], axis=1), float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        least = tl.where(higher == float("-inf"), 0.0, higher)  # nothing was seen yet
        weight, kept = tl.exp2(score - least), tl.exp2(top - least)
        mean = mean * kept + tl.sum(weight[:, None] * tl.where(seen[:, None], v, 0.0), axis=0)
        total = total * kept + tl.sum(weight, axis=0)
        top = higher
    return top, total, mean


@triton.jit
def _leave(  # type: ignore[no-untyped-def]
    y, sums, tops, part, columns, inside, top, total, mean, SIZE: tl.constexpr, SPLITS: tl.constexpr
):
    if SPLITS == 1:
        tl.store(y + part * SIZE + columns, (mean / total).to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(sums + part * SIZE + columns, mean, mask=inside)
        tl.store(tops + 2 * part, top)
        tl.store(tops + 2 * part + 1, total)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, positions, slot_at, mask, keys, values, inv_freq, q_norm, k_norm, y, sums, tops,
    capacity, heads, window, scaling, rope_scaling, eps,
    GROUP: tl.constexpr, NORM: tl.constexpr, RUN: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    slot = tl.load(slot_at).to(tl.int32)
    if split == 0 or split * RUN < slot:
        kv_heads, kv = heads // GROUP, head // GROUP
        columns, half = tl.arange(0, WIDE), SIZE // 2
        inside = columns < SIZE
        kind: tl.constexpr = qkv.dtype.element_ty
        cos, sin = _angles(positions + row, inv_freq + columns % half, rope_scaling, inside, kind)
        given = qkv + row * (heads + 2 * kv_heads) * SIZE
        q = (
            _turned(given + head * SIZE, columns, half, inside, cos, sin, q_norm, SIZE, eps, NORM).to(tl.float32)
            * scaling
        )
        base = (row * kv_heads + kv) * capacity * SIZE
        top, total, mean = float("-inf"), 0.0, tl.zeros([WIDE], tl.float32)
        if split == 0:
            k = _turned(given + (heads + kv) * SIZE, columns, half, inside, cos, sin, k_norm, SIZE, eps, NORM)
            v = tl.load(given + (heads + kv_heads + kv) * SIZE + columns, mask=inside, other=0.0)
            if head % GROUP == 0:
                tl.store(keys + base + slot.to(tl.int64) * SIZE + columns, k, mask=inside)
                tl.store(values + base + slot.to(tl.int64) * SIZE + columns, v, mask=inside)
            top, total, mean = tl.sum(q * k.to(tl.float32), axis=0), 1.0, v.to(tl.float32)
        first = tl.where(window > 0, tl.maximum(slot + 1 - window, 0), 0)
        begin = tl.maximum(first // SLOTS * SLOTS, split * RUN)
        top, total, mean = _scan(
            keys + base, values + base, mask + row * capacity, q, top, total, mean, begin,
            tl.minimum(slot, (split + 1) * RUN), first, columns, inside, SIZE, SLOTS,
        )  # fmt: skip
        part = (row * heads + head) * SPLITS + split
        _leave(y, sums, tops, part, columns, inside, top, total, mean, SIZE, SPLITS)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    slot_at, sums, tops, y, heads,
    RUN: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr,
    TOGETHER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    used = tl.maximum(tl.cdiv(tl.load(slot_at).to(tl.int32), RUN), 1)
    columns, part = tl.arange(0, WIDE), (row * heads + head) * SPLITS
    inside = columns < SIZE
    runs = tl.arange(0, MOST)
    top = tl.load(tops + 2 * (part + runs), mask=runs < used, other=float("-inf"))
    highest = tl.max(top, axis=0)
    parts = tl.load(tops + 2 * (part + runs) + 1, mask=runs < used, other=0.0)
    total = tl.sum(tl.exp2(top - highest) * parts, axis=0)
    mean = tl.zeros([WIDE], tl.float32)
    for start in tl.range(0, used, TOGETHER, num_stages=1):
        run = start + tl.arange(0, TOGETHER)
        kept = tl.exp2(tl.load(tops + 2 * (part + run), mask=run < used, other=float("-inf")) - highest)
        held = (part + run)[:, None] * SIZE + columns[None, :]
        some = tl.load(sums + held, mask=(run < used)[:, None] & inside[None, :], other=0.0)
        mean += tl.sum(kept[:, None] * some, axis=0)
    tl.store(y + (row * heads + head) * SIZE + columns, (mean / total).to(y.dtype.element_ty), mask=inside)


def decode_attention_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
) -> Tensor:
    """As the operation; qkv, positions, mask and the cache contiguous."""
    rows, capacity = qkv.shape[0], keys.shape[2]
    y = qkv.new_empty(rows, shape.heads * shape.size)
    splits = triton.cdiv(capacity, SPLIT)
    wide = triton.next_power_of_2(shape.size)
    sums = y if splits == 1 else qkv.new_empty((rows, shape.heads, splits, shape.size), dtype=torch.float32)
    tops = y if splits == 1 else qkv.new_empty((rows, shape.heads, splits, 2), dtype=torch.float32)
    norms = (qkv if shape.q_norm is None else shape.q_norm, qkv if shape.k_norm is None else shape.k_norm)
    dependent, options = _dependent(qkv)
    with on(qkv), _said():
        _attend[(shape.heads, rows, splits)](
            qkv, positions, slot, mask, keys, values, shape.inv_freq, *norms, y, sums, tops,
            capacity, shape.heads, shape.window, shape.scaling * LOG2_E, shape.rope_scaling, shape.eps,
            shape.heads // shape.kv_heads, shape.q_norm is not None, SPLIT, BLOCK, shape.size, wide, splits, dependent,
            num_warps=WARPS, **options,
        )  # fmt: skip
        if splits > 1:
            _combine[(shape.heads, rows)](
                slot, sums, tops, y, shape.heads, SPLIT, shape.size, wide, splits, triton.next_power_of_2(splits),
                TOGETHER, dependent, num_warps=4, **options,
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
