"""One token's attention over a static cache, from the row of q, k and v as the product before it leaves them.

    qkv[B, (Hq + 2 Hkv) D]   q, k turned by the rotary embedding at positions[B, 1], after a norm over D if there is one
    keys, values[B, Hkv, L, D]   at slot[1], k and v are written; slots before it are read where mask[B, L] is not zero
    y[B, Hq D] = softmax(scaling q k^T) v

Query heads h share the cached head h // (Hq / Hkv). A window w > 0 shows the last w slots, the new one among them.
positions, slot and mask are int64 and read on the device. Rotary layout and roundings are those of transformers' Llama;
scores and sums are float32. Long caches are cut into runs of SPLIT slots whose results a second kernel adds up, as in
Dao et al. 2023, "Flash-Decoding".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import rmsnorm, rope
from accelpatch.kernels.triton import launch

SIZES = range(16, 257, 2)  # of a head


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """What all tokens of a layer share. inv_freq[D / 2] and q_norm, k_norm[D] (or None) lie on the device.

    scaling: of the scores; rope_scaling: of cosines and sines; window: 0 shows everything.
    """

    heads: int
    kv_heads: int
    size: int
    scaling: float
    inv_freq: Tensor
    rope_scaling: float = 1.0
    window: int = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    @property
    def columns(self) -> int:
        """Of qkv."""
        return (self.heads + 2 * self.kv_heads) * self.size


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[B, H, 1, D] by the rotary embedding, rounded as transformers rounds it."""
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


def reference_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
) -> Tensor:
    """By torch in qkv's dtype, the softmax in float32 at least."""
    rows, sizes = qkv.shape[0], (shape.heads, shape.kv_heads, shape.kv_heads)
    parts = qkv.view(rows, 1, -1, shape.size).transpose(1, 2).split(sizes, dim=1)
    norms = (shape.q_norm, shape.k_norm)
    normed = (p if n is None else rmsnorm.reference(p, n, shape.eps, False) for p, n in zip(parts, norms, strict=False))
    cos, sin = rope.rotary_cos_sin(positions, shape.inv_freq, shape.rope_scaling, qkv.dtype)
    q, k = (turned(part, cos, sin) for part in normed)
    keys.index_copy_(2, slot, k)
    values.index_copy_(2, slot, parts[2])
    at = torch.arange(keys.shape[2], device=qkv.device)
    seen = (at <= slot) & (at > slot - (shape.window or keys.shape[2] + 1))
    hidden = ~(seen & (mask.ne(0) | (at == slot)))[:, None, None]
    # what hidden slots hold must not matter
    held = [one.masked_fill(hidden.transpose(2, 3), 0).repeat_interleave(shape.heads // shape.kv_heads, 1)
            for one in (keys, values)]  # fmt: skip
    wide = torch.promote_types(qkv.dtype, torch.float32)
    scores = (q.to(wide) @ held[0].to(wide).mT * shape.scaling).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ held[1].to(wide)).to(qkv.dtype).view(rows, -1)


def why_not(shape: AttentionShape, dtype: torch.dtype, device: Device) -> str | None:
    """Why `decode_attention_` cannot run; None where it can."""
    if shape.size not in SIZES or shape.heads % shape.kv_heads:
        return f"attention heads of size {shape.size}, {shape.heads} on {shape.kv_heads}"
    return None if device.kind == "cpu" else launch.why_not(device, dtype)


def decode_attention_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape
) -> Tensor:
    """y[B, Hq D] in qkv's dtype; k and v are written into the cache. Triton on a GPU, torch on a CPU."""
    if qkv.device.type == "cpu":
        return reference_(qkv, positions, slot, mask, keys, values, shape)
    from accelpatch.kernels.triton import decode_attention as kernel

    return kernel.decode_attention_(qkv, positions, slot, mask, keys, values, shape)
