"""Attention of a prompt, from the rows of a qkv linear layer; fills an empty cache.

    qkv[B L, (Hq + 2 Hkv) D]     q and k: RMSNorm over D if there is a norm, then rotary embedding at positions[B, L];
                                 q in place
    keys, values[B, Hkv, C, D]   k and v are written into the slots 0 to L - 1
    y[B L, Hq D] = softmax(scaling q k^T) v   causal

Tokens where mask[B, L] is 0, and those outside a window, are hidden. Shapes, rotary layout and roundings are those of
decode_attention.py; the softmax and GEMMs are torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops import rmsnorm, rope
from accelpatch.kernels.ops.attention_shape import AttentionShape
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

ROTARY, ATTENTION = "prompt_rotary", "prompt_attention"


def rotate_reference_(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """Norm and rotary embedding of q in place and of k into the cache, and v into the cache; in plain torch."""
    batch, length = positions.shape
    heads = qkv.view(batch, length, -1, shape.size)
    q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
    cos, sin = (
        one[:, :, None] for one in rope.rotary_cos_sin(positions, shape.inv_freq, shape.rope_scaling, qkv.dtype)
    )
    for part, weight, out in ((q, shape.q_norm, q), (k, shape.k_norm, keys[:, :, :length].transpose(1, 2))):
        normed = part if weight is None else rmsnorm.reference(part, weight, shape.eps, False)
        first, second = normed.chunk(2, dim=-1)
        out.copy_(normed * cos + torch.cat((-second, first), dim=-1) * sin)
    values[:, :, :length].copy_(v.transpose(1, 2))


def rotate_(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """As `rotate_reference_`, by Triton on a GPU."""
    dispatch.run(ROTARY, rotate_spec, qkv.device, (qkv, positions, keys, values, shape))


def rotate_spec(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Spec:
    """The Spec of a call, for dispatch."""
    rows, length = positions.shape
    return Spec(ROTARY, {"B": rows, "L": length, "D": shape.size}, qkv.dtype)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `rotate_by_triton` cannot run a spec; None where it can."""
    return launch.why_not(device, spec.dtype)


def rotate_by_triton(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """The implementation `triton` of the rotary embedding: one launch."""
    from accelpatch.kernels.triton import prompt_attention as kernel

    kernel.rotate_(qkv, positions, keys, values, shape)


def visible(mask: Tensor | None, length: int, window: int, device: torch.device) -> Tensor | None:
    """Boolean mask [B or 1, 1, L, L] of the tokens that each one attends to; None for plain causal masking.

    A masked token attends to itself, so that its output is not NaN: 0 * NaN would spread.
    """
    if mask is None and not 0 < window < length:
        return None
    at = torch.arange(length, device=device)
    seen = at[:, None] >= at
    if window:
        seen = seen & (at[:, None] - at < window)
    if mask is not None:
        seen = seen & mask.ne(0)[:, None] | (at[:, None] == at)
    return seen.view(-1, 1, length, length)


def prompt_attention_(
    qkv: Tensor, positions: Tensor, seen: Tensor | None, keys: Tensor, values: Tensor, shape: AttentionShape
) -> Tensor:
    """y[B L, Hq D] in qkv's dtype. qkv must be contiguous and is overwritten; seen: the result of `visible`."""
    batch, length = positions.shape
    rotate_(qkv, positions, keys, values, shape)
    q = qkv.view(batch, length, -1, shape.size)[:, :, : shape.heads].transpose(1, 2)
    args = (q, keys[:, :, :length], values[:, :, :length], seen, shape.scaling)
    y: Tensor = dispatch.run(ATTENTION, attention_spec, qkv.device, args)
    return y.transpose(1, 2).reshape(batch * length, -1)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """softmax(scaling q k^T) v [B, Hq, L, D] over the tokens that are seen; None: causal. In float32 or wider."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (one.repeat_interleave(group, 1).to(wide) for one in (k, v))
    shown = torch.ones(length, length, dtype=torch.bool, device=q.device).tril() if seen is None else seen
    scores = (q.to(wide) @ k.mT * scaling).masked_fill(~shown, float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype)


def attention_spec(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scaling: float) -> Spec:
    """The Spec of a call, for dispatch."""
    rows, heads, length, size = q.shape
    return Spec(ATTENTION, {"B": rows, "H": heads, "L": length, "D": size}, q.dtype)


def attention_by_torch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """The implementation `torch`: scaled_dot_product_attention."""
    group = q.shape[1] // k.shape[1]
    if seen is not None and group > 1:  # torch's fast attention kernels take a mask or grouped heads, not both
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=group > 1
    )


KERNELS = {
    ROTARY: Kernel(
        rotate_,
        rotate_reference_,
        rotate_spec,
        {
            "triton": Implementation(rotate_by_triton, triton_why_not),
            "torch": Implementation(rotate_reference_, dispatch.anywhere),
        },
    ),
    ATTENTION: Kernel(
        attention_by_torch,
        attention_reference,
        attention_spec,
        {"torch": Implementation(attention_by_torch, dispatch.anywhere)},
    ),
}
