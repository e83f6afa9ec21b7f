"""Attention of a prompt, from the rows of a qkv linear layer, over a static cache.

    qkv[B L, (Hq + 2 Hkv) D]     q and k: RMSNorm over D if there is a norm, then rotary embedding at positions[B, L] of
                                 the first R columns; q in place
    keys, values[B, Hkv, C, D]   k and v are written into the slots start to start + L - 1
    y[B L, Hq D]                 flash_attention of q over the slots 0 to start + L - 1, causal

Shapes, rotary layout and roundings are those of decode_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.layouts.kv_states import States
from accelpatch.kernels.ops.attention import rope
from accelpatch.kernels.ops.attention.decode_attention import rotated
from accelpatch.kernels.ops.attention.flash_attention import flash_attention
from accelpatch.kernels.ops.attention.mask import visible
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

ROTARY = "prompt_rotary"


@dataclass(frozen=True, eq=False)
class Shown:
    """Which keys the tokens of a prompt see, in flash_attention's arguments; by default all tokens up to their own.

    ranges[B, L, 2]: for padding at the ends of a row; they include the window. bias[B, 1, L, S] bool: for padding
    anywhere. window, causal: as in flash_attention.
    """

    ranges: Tensor | None = None
    bias: Tensor | None = None
    window: int = 0
    causal: bool = True


def shown(mask: Tensor | None, start: int, length: int, window: int) -> Shown:
    """The Shown of the tokens start to start + length - 1, given mask[B, S], 0 for padding. Waits for the device, if a
    mask is given. Padding sees no key where none is before it, and its rows of y are then zero."""
    if mask is None:
        return Shown(window=window)
    keys = start + length
    given = mask[:, :keys].ne(0)
    low = given.to(torch.uint8).argmax(1)
    end = low + given.sum(1)
    at = torch.arange(keys, device=mask.device)
    own = at[start:] + 1
    if torch.equal(given, (at >= low[:, None]) & (at < end[:, None])):
        high = torch.minimum(own, end[:, None])
        first = torch.maximum(low[:, None], own - window) if window else low[:, None].expand_as(high)
        return Shown(torch.stack((first, high), -1).to(torch.int32))
    return Shown(None, (given[:, None] & (at < own[:, None]))[:, None], window)


def _visible(seen: Shown, length: int, keys: int, like: Tensor) -> Tensor:
    """Boolean [B or 1, 1, L, S]: which keys the last `length` tokens see."""
    given = visible(length, keys, seen.ranges, seen.causal, seen.window, like)
    if given is None or seen.bias is None:
        given = seen.bias if given is None else given
        assert given is not None
        return given
    return given & seen.bias


def module_mask(seen: Shown, length: int, keys: int, like: Tensor, blind: bool = False) -> Tensor:
    """Boolean [B or 1, 1, L, S]: which keys the last `length` tokens see, for a layer's module. A token without a key
    sees itself, since its row would be NaN, which 0 * NaN would spread. blind: leave such tokens without a key."""
    given = _visible(seen, length, keys, like)
    if blind:
        return given
    own = torch.eye(keys, dtype=torch.bool, device=like.device)[-length:]
    return given | (own & ~given.any(-1, keepdim=True))


def rotate_reference_(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """Norm and rotary embedding of q in place and of k into the cache, and v into the cache; in plain torch."""
    tables = rope.rotary_cos_sin(positions, shape.inv_freq, shape.rope_scaling, qkv.dtype)
    rotate_by_tables_(qkv, *tables, keys, values, shape)


def rotate_by_tables_(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
) -> None:
    """As `rotate_reference_`, with the cosines and sines [B, L, R] of each token."""
    batch, length = cos.shape[:2]
    heads = qkv.view(batch, length, -1, shape.size).transpose(1, 2)
    q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    for part, weight, out in ((q, shape.q_norm, q), (k, shape.k_norm, keys[:, :, :length])):
        normed = part if weight is None else rmsnorm.reference(part, weight, shape.eps, shape.plus_one)
        out.copy_(rotated(normed, cos, sin))
    values[:, :, :length].copy_(v)


def rotate_(qkv: Tensor, positions: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> None:
    """As `rotate_reference_`, by Triton on a GPU. keys and values may be the later slots of a contiguous cache."""
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


def prompt_attention_(
    qkv: Tensor, positions: Tensor, seen: Shown, keys: States, values: States, shape: AttentionShape, start: int = 0
) -> Tensor:
    """y[B L, Hq D] in qkv's dtype. qkv must be contiguous and is overwritten; seen: of `shown`.

    With a cache in 8 bits it attends to the rounded states, those of its own tokens too. So the result does not depend
    on how a prompt is split into parts, and later steps see the same keys.
    """
    batch, length = positions.shape
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        rotate_(qkv, positions, keys[:, :, start:], values[:, :, start:], shape)
    else:
        new = qkv.new_empty(2, batch, shape.kv_heads, length, shape.size)
        rotate_(qkv, positions, new[0], new[1], shape)
        keys[:, :, start : start + length], values[:, :, start : start + length] = new[0], new[1]
    return attend(qkv, positions, seen, keys[:, :, : start + length], values[:, :, : start + length], shape)


def attend(qkv: Tensor, positions: Tensor, seen: Shown, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    """y[B L, Hq D] of q in qkv over keys and values[B, Hkv, S, D], of which q's are the last."""
    batch, length = positions.shape
    q = qkv.view(batch, length, -1, shape.size)[:, :, : shape.heads].transpose(1, 2)
    y: Tensor = flash_attention.function(
        q, keys, values, seen.ranges, seen.bias, shape.sinks, seen.causal, seen.window, shape.softcap, shape.scaling
    )
    return y.view(batch * length, -1)


def attend_by_torch(
    qkv: Tensor, positions: Tensor, seen: Shown, keys: Tensor, values: Tensor, shape: AttentionShape, eager: bool
) -> Tensor:
    """As `attend`, by the functions that transformers' implementations `sdpa` and `eager` call: a token that sees no
    key gets what these functions give."""
    batch, length = positions.shape
    q = qkv.view(batch, length, -1, shape.size)[:, :, : shape.heads].transpose(1, 2)
    k, v = (one.repeat_interleave(shape.heads // shape.kv_heads, 1) for one in (keys, values))
    mask = _visible(seen, length, k.shape[2], q)
    if eager:
        scores = q @ k.transpose(2, 3) * shape.scaling
        scores = (scores / shape.softcap).tanh() * shape.softcap if shape.softcap else scores
        scores = scores + torch.zeros_like(scores).masked_fill_(~mask, torch.finfo(q.dtype).min)
        if shape.sinks is not None:
            sinks = shape.sinks.to(q.dtype)[None, :, None, None].expand(batch, -1, length, 1)
            scores = torch.cat((scores, sinks), -1)
        y = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[2]].to(q.dtype) @ v
    else:
        y = functional.scaled_dot_product_attention(q, k, v, mask, scale=shape.scaling)
    return y.transpose(1, 2).reshape(batch * length, -1)


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
}
