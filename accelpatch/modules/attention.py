"""Attention modules whose scores, softmax and sum run through the operation flash_attention.

The modules keep transformers' own forward. Only their configuration differs: it is a copy that names this package's
attention function. transformers looks up both the function and its mask function under that name:

    function   module, q[B, Hq, L, D], k and v[B, Hkv, S, D], mask -> y[B, L, Hq, D]
    mask       None where every query sees all keys, or where masking is causal with as many keys as queries; else
               int32 [B, 1, L, 2], the keys low to high - 1 that each query sees; int32 [1, 1, 0, W]: causal, the
               queries are the last ones, with a window of W tokens (0: none); or, where what a query sees has holes,
               transformers' own bool [B, 1, L, S]

Where a mask of L x S is needed, parts of it are made and dropped one by one, so that long prompts never have a whole
one. Masks of other implementations
(bool or float, [B, 1, L, S]) are taken too: those that the caller gives, and those of models in which some attention
modules were not replaced.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.operation import wants_gradient
from accelpatch.kernels.ops.attention.flash_attention import by_eager, flash_attention
from accelpatch.kernels.ops.attention.mask import combined, texts_of, visible
from accelpatch.modules.attention_mask import attention_mask
from accelpatch.modules.attention_settings import (
    NAME,
    SETTING,
    named,
    original_attention,
    original_name,
    was_eager,
)
from accelpatch.modules.replacement import Replacement, adopt

WEIGHTS = "output_attentions"
TEXTS = "_accelpatch_texts"  # attribute of a mask: what `texts_of` found


class FlashAttention(Replacement):
    """An attention module with this package's attention function.

    replaced_config, replaced_name, own_config: see attention_settings. implementation: the name of the one that runs
    every call, or None.
    """

    replaced_config: Any
    replaced_name: str
    own_config: Any
    implementation: str | None


def attention(original: nn.Module, implementation: str | None = None) -> FlashAttention:
    """A FlashAttention in the place of `original`, with its children and a copy of its configuration."""
    register()
    new = adopt(FlashAttention, original)
    attributes, config = new.__dict__, original.config
    attributes["replaced_config"], attributes["replaced_name"] = config, vars(config)[SETTING]
    attributes["config"] = attributes["own_config"] = named(copy.copy(config))
    attributes["implementation"] = implementation
    return new


def register() -> None:
    """Register the attention function and the mask function with transformers under NAME, which is ours alone."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface. Masks as above; window and padding are in them.

    Attention weights are computed only by the original's attention, in calls that request them.
    """
    compiling = torch.compiler.is_compiling()
    name = None if compiling else original_name(module)
    weighed = name is None and options.get(WEIGHTS) and was_eager(module)
    if (weighed and compiling) or ((weighed or name) and getattr(attention_mask, "dtype", None) == torch.int32):
        raise KernelError(
            "attention weights are made in calls of the model, not in those of its layers with masks of this "
            "attention, nor under torch.compile: call model.set_attn_implementation('eager')"
        )
    name = "eager" if weighed else name
    if name is not None:
        return original_attention(module, name)(module, query, key, value, attention_mask, **options)
    y = _computed(module, query, key, value, attention_mask, **options)
    evens = was_eager(module) or options.get("position_bias") is not None  # `sdpa` adds the least float to a bias too
    blind = _blind(attention_mask) if evens and options.get("s_aux") is None else None
    return y if blind is None else torch.where(blind, _mean(query, value), y), None


def _computed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """y[B, L, Hq, D]. position_bias[B or 1, Hq or 1, L, S]: added to the scores. s_aux[Hq]: attention sinks. Gradients
    and dropout are torch's own."""
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4):
        raise KernelError("the model's masks are of another form than [B, 1, L, S], those of flash_attention_2 or "
                          "flex_attention: call model.set_attn_implementation('sdpa')")  # fmt: skip
    length, size = query.shape[2], value.shape[-1]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and length > 1
    if attention_mask is None and causal and key.shape[2] > length:  # the slots of an empty static cache
        key, value = key[:, :, :length], value[:, :, :length]
    bias = None if position_bias is None else position_bias[..., : key.shape[2]]
    ranges, bias, causal, window = _seen(attention_mask, bias, causal, query, key)
    if attention_mask is None and causal:  # a window that hides nothing, but where the masks are flash-attn's: None
        window = kwargs.get("sliding_window") or 0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = _of_one_size(query, key, value)
    args = (query, key, value, ranges, bias, s_aux, causal, window, softcap or 0.0)
    tensors = (query, key, value, bias, s_aux)
    if dropout or wants_gradient(tensors):
        texts = None if ranges is None or bias is not None else _texts(attention_mask, ranges)
        return _differentiable(*args, scale, dropout, texts)[..., :size]
    wanted = getattr(module, "implementation", None)
    with nullcontext() if wanted is None else dispatch.forced(wanted):
        return flash_attention(*args, scale)[..., :size]


def _blind(mask: Tensor | None) -> Tensor | None:
    """Boolean [B or 1, L, Hq or 1, 1]: which queries see no key; None where none can be."""
    if mask is None or not mask.shape[2]:
        return None
    if mask.dtype == torch.int32:
        seen = mask[..., 0] < mask[..., 1]
    elif mask.dtype == torch.bool:
        seen = mask.any(-1)
    else:
        seen = (mask != torch.finfo(mask.dtype).min).any(-1)
    return ~seen.transpose(1, 2)[..., None]


def _mean(query: Tensor, value: Tensor) -> Tensor:
    """[B, 1, Hq, D]: the output of a query that sees no key, the mean of v[B, Hkv, S, D], as with equal scores."""
    even = value.new_full((1, value.shape[2]), 1 / max(1, value.shape[2]))
    return (even @ value).repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)


def _seen(
    mask: Tensor | None, bias: Tensor | None, causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """(ranges, bias, causal, window) as flash_attention takes them, of a mask [B, 1, L, S] of any kind."""
    length, keys = query.shape[2], key.shape[2]
    if mask is None and causal and length > keys:  # the causal mask is aligned with the first key
        high = torch.arange(1, length + 1, dtype=torch.int32, device=query.device).clamp(max=keys)
        return torch.stack((torch.zeros_like(high), high), -1).expand(len(query), -1, -1), bias, True, 0
    if mask is None:
        return None, bias, causal, 0
    if mask.dtype != torch.int32:
        mask = mask[..., :keys]
        if bias is not None:  # as one
            mask = torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
        return None, mask, False, 0
    if mask.shape[2]:
        return mask[:, 0], bias, causal, 0
    return None, bias, length > 1 or mask.shape[3] > 0, mask.shape[3]


def _texts(mask: Any, ranges: Tensor) -> list[int] | None:
    """`texts_of` of a call's mask. All layers share the mask, so that the device is waited for once."""
    if not hasattr(mask, TEXTS):
        setattr(mask, TEXTS, texts_of(ranges))
    found: list[int] | None = getattr(mask, TEXTS)
    return found


def _of_one_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The three tensors with head sizes made equal by zeros, which add nothing to the scores."""
    more = value.shape[-1] - query.shape[-1]
    if more > 0:
        return functional.pad(query, (0, more)), functional.pad(key, (0, more)), value
    return query, key, functional.pad(value, (0, -more)) if more else value


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None, bias: Tensor | None, sinks: Tensor | None, causal: bool,
    window: int, softcap: float, scaling: float, dropout: float, texts: list[int] | None,
) -> Tensor:  # fmt: skip
    """As the operation, in torch's own functions, which have gradients. texts: of `texts_of`, or None."""
    if softcap or sinks is not None:
        if dropout:
            raise KernelError("attention with a softcap or sinks has no dropout here: set attention_dropout to 0")
        return by_eager(q, k, v, ranges, bias, sinks, causal, window, softcap, scaling)
    group, length, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    if texts is not None:
        each = zip(*(one.split(texts, 2) for one in (q, k, v)), strict=True)
        attend = functional.scaled_dot_product_attention
        made = [attend(a, b, c, dropout_p=dropout, is_causal=True, scale=scaling) for a, b, c in each]
        return torch.cat(made, 2).transpose(1, 2)
    plain = ranges is None and bias is None and causal and not window and length == keys
    mask = None if plain else combined(visible(length, keys, ranges, causal, window, q), bias, q.dtype)
    y = functional.scaled_dot_product_attention(q, k, v, mask, dropout, plain, scale=scaling)
    return y.transpose(1, 2)
