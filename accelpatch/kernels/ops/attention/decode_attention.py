"""Attention of one to eight new tokens per row over a static cache, from the rows of a qkv linear layer.

    qkv[B T, (Hq + 2 Hkv) D]     row b T + t is token t of row b; also [B, T, (Hq + 2 Hkv) D]
    positions[B, T]              q and k: RMSNorm over D if there is a norm, then rotary embedding
    keys, values[B, Hkv, L, D]   k and v of token t are written at slot[B] + t; there must be room for all of them
    y = softmax(scaling q k^T) v over the slots before slot[B] where mask[B, L] is not 0, and the new ones up to its own

Query head h uses KV head h // (Hq / Hkv). A window w > 0 shows the last w slots, the token's own included. softcap c >
0 turns a score s into c tanh(s / c). sinks[Hq] (float32) add one more term exp(sink) to the softmax's denominator. The
rotary embedding applies to the first len(inv_freq) * 2 columns of a head. positions, slot and mask are int64 and read
on the device. Rotary layout and roundings are those of transformers' Llama; scores and sums are float32.

The result of a token is independent of T, B, L and (where positions count from the end of a row's padding) of the
padding: it has the bits that it would have alone, after its predecessors were cached. Long caches are cut into KV
splits whose partial softmax states are reduced in an order that depends on the slots alone; see Dao et al. 2023,
"Flash-Decoding".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.attention_shape import MAX_NEW_TOKENS, AttentionShape
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts.kv_states import FLOAT, States, floats, format_of, scales_why_not
from accelpatch.kernels.ops.attention import rope
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "decode_attention"
SIZES = range(16, 257, 2)  # supported head sizes
WIDEST = 128  # largest head size of the Triton kernel in float32


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[B, H, T, D] with rotary embedding cos, sin[B, T, R], rounded as transformers does."""
    some, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = some.chunk(2, dim=-1)
    some = some * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]
    return torch.cat((some, rest), dim=-1)


def reference_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape
) -> Tensor:
    """In plain torch in qkv's dtype; the softmax in float32 or wider."""
    (rows, tokens), sizes = positions.shape, (shape.heads, shape.kv_heads, shape.kv_heads)
    parts = qkv.view(rows, tokens, -1, shape.size).transpose(1, 2).split(sizes, dim=1)
    norms = (shape.q_norm, shape.k_norm)
    normed = (
        p if n is None else rmsnorm.reference(p, n, shape.eps, shape.plus_one)
        for p, n in zip(parts, norms, strict=False)
    )  # fmt: skip
    cos, sin = rope.rotary_cos_sin(positions, shape.inv_freq, shape.rope_scaling, qkv.dtype)
    q, k = (rotated(part, cos, sin) for part in normed)
    own = slot[:, None] + torch.arange(tokens, device=qkv.device)
    row = torch.arange(rows, device=qkv.device)[:, None]
    keys[row, :, own], values[row, :, own] = k.transpose(1, 2), parts[2].transpose(1, 2)
    visible = mask.ne(0) | (torch.arange(keys.shape[2], device=qkv.device) >= slot[:, None])
    # Token by token: torch's GEMMs may round a token differently in a batch of tokens.
    each = [_one(q[:, :, at : at + 1], visible, own[:, at, None], keys, values, shape) for at in range(tokens)]
    return torch.cat(each, dim=2).transpose(1, 2).reshape(*qkv.shape[:-1], -1)


def _one(q: Tensor, visible: Tensor, own: Tensor, keys: States, values: States, shape: AttentionShape) -> Tensor:
    """y[B, Hq, 1, D] of the token at slot own[B, 1], which attends to itself and to earlier slots where visible[B,
    L]."""
    at = torch.arange(keys.shape[2], device=q.device)
    hidden = ~(visible & (at <= own) & (at > own - (shape.window or keys.shape[2] + 1)))[:, None, None]
    # Hidden slots may hold NaN, which a probability of 0 would not hide.
    cached = [one.masked_fill(hidden.transpose(2, 3), 0).repeat_interleave(shape.heads // shape.kv_heads, 1)
            for one in (floats(keys), floats(values))]  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ cached[0].to(wide).mT * shape.scaling
    if shape.softcap:
        scores = (scores / shape.softcap).tanh() * shape.softcap
    scores = scores.masked_fill(hidden, float("-inf"))
    if shape.sinks is not None:
        scores = torch.cat((scores, shape.sinks.to(wide)[None, :, None, None].expand(len(q), -1, -1, -1)), -1)
    return (scores.softmax(-1)[..., : keys.shape[2]] @ cached[1].to(wide)).to(q.dtype)


def why_not(shape: AttentionShape, dtype: torch.dtype, device: Device, cache: str = FLOAT) -> str | None:
    """Why `decode_attention_` cannot run by a kernel; None where it can. cache: the format of keys and values."""
    if shape.size not in SIZES or shape.heads % shape.kv_heads:
        return f"attention heads of size {shape.size}, {shape.heads} on {shape.kv_heads}"
    if not 0 < shape.rotary_dim <= shape.size:
        return f"a rotary embedding of {shape.rotary_dim} columns on heads of size {shape.size}"
    if device.kind == "cpu":
        return None
    if attention.why_not(shape, dtype, device, cache) is None:
        return None
    return why_no_triton(shape, dtype, device, cache)


def why_no_triton(shape: AttentionShape, dtype: torch.dtype, device: Device, cache: str = FLOAT) -> str | None:
    """Why the Triton kernel cannot run; None where it can. cache: the format of keys and values."""
    if dtype == torch.float32 and shape.size > WIDEST:
        return f"attention heads of size {shape.size} in float32"
    return launch.why_not(device, dtype)


def by_triton(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape,
    following: Tensor | None = None, consumer: Signal | None = None,
) -> Tensor:  # fmt: skip
    """The implementation `triton`; it waits for all of qkv, and prefetches nothing."""
    from accelpatch.kernels.triton import decode_attention as kernel

    return kernel.decode_attention_(qkv, positions, slot, mask, keys, values, shape)


def by_torch(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape,
    following: Tensor | None = None, consumer: Signal | None = None,
) -> Tensor:  # fmt: skip
    """The implementation `torch`: the plain form."""
    return reference_(qkv, positions, slot, mask, keys, values, shape)


def decode_attention_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape,
    following: Tensor | None = None, consumer: Signal | None = None,
) -> Tensor:  # fmt: skip
    """y[B T, Hq D] (or [B, T, ...], as qkv) in qkv's dtype; k and v are written into the cache.

    following: the weight that the next kernel reads first; a GPU prefetches it into the L2 cache. consumer: the flag
    for the q and k columns of qkv, on which the device library starts.

    Runs the device library on a GPU, Triton where that does not support the layer, and torch on a CPU. A row's bits do
    not depend on the other rows, but differ between the three. Raises KernelError for shapes that do not fit together.
    """
    packed = all(one.is_contiguous() for one in (qkv, positions, slot, mask, keys, values))
    require(packed, OP, "qkv, positions, slot, mask and the cache are contiguous")
    args = (qkv, positions, slot, mask, keys, values, shape, following, consumer)
    y: Tensor = dispatch.run(OP, spec, qkv.device, args)
    return y


def spec(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape,
    following: Tensor | None = None, consumer: Signal | None = None,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit: the kernels trust pointers
    and sizes."""
    rows, tokens = positions.shape
    require(1 <= tokens <= MAX_NEW_TOKENS, OP, f"takes 1 to {MAX_NEW_TOKENS} tokens a row, not {tokens}")
    due = rows * tokens * shape.columns
    require(qkv.numel() == due, OP, f"qkv holds {due} numbers, not {list(qkv.shape)}")
    cache_shape = (rows, shape.kv_heads, keys.shape[2], shape.size)
    fit = keys.shape == cache_shape and values.shape == cache_shape and mask.shape == (rows, keys.shape[2])
    require(
        fit,
        OP,
        f"cache {list(keys.shape)}, {list(values.shape)} and mask {list(mask.shape)} are not of {list(cache_shape)}",
    )
    alike = all(one.dtype == qkv.dtype for one in (keys, values))
    whole = all(one.dtype == torch.int64 for one in (positions, slot, mask))
    require(slot.shape == (rows,), OP, f"slot holds a number for each of {rows} rows, not {list(slot.shape)}")
    require(alike and whole, OP, "q, k, v and the cache have one dtype; positions, slot and mask are int64")
    same = format_of(keys) == format_of(values)
    require(same, OP, f"keys and values are of one format, not {format_of(keys)} and {format_of(values)}")
    for one in (keys, values):
        if reason := scales_why_not(one):
            require(False, OP, reason)
    if shape.sinks is not None:
        fits = shape.sinks.shape == (shape.heads,) and shape.sinks.dtype == torch.float32
        require(fits and shape.sinks.is_contiguous(), OP, f"sinks are float32 [{shape.heads}], one a head")
    options = {"shape": shape, "cache": format_of(keys)}
    return Spec(OP, {"B": rows, "T": tokens, "L": keys.shape[2]}, qkv.dtype, options=options)


def _by(why_not: Callable[..., str | None]) -> Callable[[Spec, Device], str | None]:
    return lambda spec, device: why_not(spec.options["shape"], spec.dtype, device, spec.options.get("cache", FLOAT))


IMPLEMENTATIONS = {
    "hip": Implementation(attention.decode_attention_, _by(attention.why_not)),
    "triton": Implementation(by_triton, _by(why_no_triton)),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(decode_attention_, by_torch, spec, IMPLEMENTATIONS)}
