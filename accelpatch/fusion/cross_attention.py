"""The two attentions of a fused decoder layer of an encoder-decoder, for one new token of each row."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.fusion.cross_step import CrossStep
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.ops.attention import decode_attention


class Shapes(Protocol):
    """What has the shapes of both attentions: of the decoder's own tokens, and of the encoder's."""

    @property
    def own(self) -> AttentionShape:
        """Of the decoder's tokens."""

    @property
    def cross(self) -> AttentionShape:
        """Of the encoder's tokens."""


class StepAttention:
    """The attentions of one layer in a step: place is its index in the caches."""

    def __init__(self, shapes: Shapes, step: CrossStep, place: int, masked: bool):
        self._shapes, self._step, self._place, self._masked = shapes, step, place, masked

    def own(self, qkv: Tensor) -> Tensor:
        """Rows of q, k and v[B, 3 H D] -> rows of the output[B, H D]; k and v are cached."""
        step, cached = self._step, self._step.own.layers[self._place]
        args = (qkv, step.positions, step.slot, step.mask, cached.keys, cached.values, self._shapes.own)
        return decode_attention.decode_attention_(*args)

    def own_with_bias(self, bias: Tensor, qkv: Tensor) -> Tensor:
        """The same with scores to which bias[1 or B, H, 1, L] is added, which hides what the mask hides."""
        shape, cached = self._shapes.own, self._step.own.layers[self._place]
        q, k, v = qkv.view(len(qkv), 3, shape.heads, 1, shape.size).unbind(1)
        keys, values = cached.update(k, v)
        made = functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=shape.scaling)
        return made.reshape(len(qkv), -1)

    def cross(self, q: Tensor) -> Tensor:
        """Rows of q[B, H D] -> rows of the output[B, H D]."""
        step, cross = self._step, self._step.cross
        keys, values = cross.states[self._place]
        appended = step.appended(self._masked)[:, self._place].flatten(1)
        ends, mask = (cross.ends, cross.mask) if self._masked else (cross.last, cross.ones)
        assert mask is not None
        args = (torch.cat([q, appended], 1), step.positions, ends, mask, keys, values, self._shapes.cross)
        return decode_attention.decode_attention_(*args)


class CacheAttention:
    """The attentions of one layer over transformers' own caches. masks: of the decoder's tokens, of the
    encoder's."""

    def __init__(self, shapes: Shapes, cache: Any, place: int, masks: tuple[Tensor | None, Tensor | None]):
        self._shapes, self._cache, self._place, self._masks = shapes, cache, place, masks

    def own(self, qkv: Tensor) -> Tensor:
        """As of StepAttention."""
        return self.own_with_bias(self._masks[0], qkv)

    def own_with_bias(self, bias: Tensor | None, qkv: Tensor) -> Tensor:
        """As of StepAttention."""
        shape = self._shapes.own
        q, k, v = qkv.view(len(qkv), 3, shape.heads, 1, shape.size).unbind(1)
        keys, values = self._cache.self_attention_cache.update(k, v, self._place)
        made = functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=shape.scaling)
        return made.reshape(len(qkv), -1)

    def cross(self, q: Tensor) -> Tensor:
        """As of StepAttention."""
        shape, cached = self._shapes.cross, self._cache.cross_attention_cache.layers[self._place]
        rows, mask = q.view(len(q), shape.heads, 1, shape.size), self._masks[1]
        made = functional.scaled_dot_product_attention(
            rows, cached.keys, cached.values, attn_mask=mask, scale=shape.scaling
        )
        return made.reshape(len(q), -1)
