"""Attention modules whose scores, softmax and sum run through the operation flash_attention.

The modules keep transformers' own forward: they differ in their configuration alone, a copy that names this package's
attention function. transformers looks both the function and the mask that goes with it up under that name:

    function   module, q[B, Hq, L, D], k and v[B, Hkv, S, D], mask -> y[B, L, Hq, D]
    mask       None where every query sees all keys, or causal masking of as many keys as queries says it all; else
               int32 [B, 1, L, 2], the keys low to high - 1 that each query sees; int32 [1, 1, 0, W]: causal, the
               queries are the last ones, with a window of W tokens (0: none); or, where what a query sees has holes,
               transformers' own bool [B, 1, L, S]

A mask of L x S is made in parts, which are dropped, so that long prompts hold none. Masks of other implementations
(bool or float, [B, 1, L, S]) are taken too: those that the caller gives, and those of models in which some attention
modules were not replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention_mask import combined, visible
from accelpatch.kernels.ops.flash_attention import by_eager, flash_attention
from accelpatch.modules.replacement import Replacement, adopt

NAME = "accelpatch_attention"  # without "flash", which transformers takes for the interface of flash-attn
SETTING = "_attn_implementation_internal"  # the attribute of a configuration that holds the implementation's name
PART = 1 << 26  # elements of a mask that are made at a time


class FlashAttention(Replacement):
    """An attention module with this package's attention function.

    replaced_config: the original's configuration. implementation: the name of the one that runs every call, or None.
    """

    replaced_config: Any
    implementation: str | None


def attention(original: nn.Module, implementation: str | None = None) -> FlashAttention:
    """A FlashAttention in the place of `original`, with its children and a copy of its configuration."""
    register()
    new = adopt(FlashAttention, original)
    new.__dict__["replaced_config"] = config = original.config
    new.__dict__["config"] = named(copy.copy(config))
    new.__dict__["implementation"] = implementation
    return new


def register() -> None:
    """Make the function and the mask known to transformers under NAME, which no configuration of others has."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def named(config: Any) -> Any:
    """The same configuration, with this package's implementation in it."""
    vars(config)[SETTING] = NAME
    return config


class Registered:
    """What the attention function stands for: transformers' own functions and masks under other names."""

    def forward(self) -> Any:
        """Names the two registries, whose entries own_code reads."""
        return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def set_aside(model: nn.Module) -> list[tuple[Any, str]]:
    """Give the configurations in a model that name this package's function the originals' names, until `take_up`."""
    original = next((_name(one.replaced_config) for one in model.modules() if isinstance(one, FlashAttention)), None)
    every = {id(config): config for one in model.modules() if (config := vars(one).get("config")) is not None}
    found = [config for config in every.values() if original is not None and _name(config) == NAME]
    for config in found:
        vars(config)[SETTING] = original
    return [(config, str(original)) for config in found]


def take_up(aside: list[tuple[Any, str]]) -> None:
    """Undo `set_aside`, but for configurations that name another implementation by now."""
    for config, original in aside:
        if _name(config) == original:
            vars(config)[SETTING] = NAME


def _name(config: Any) -> Any:
    return vars(config).get(SETTING)


def configurations(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(module, new configuration) for the modules of a model in which FlashAttention stands in every place of a
    configuration: they get a copy with NAME, so that the masks are made for it. Where some attention modules of a
    configuration are not replaced, the model goes on making their masks."""
    held = [(module, _config(module)) for module in model.modules()]
    ours = {id(config): config for module, config in held if isinstance(module, FlashAttention)}
    stay = [(module, config) for module, config in held if not isinstance(module, FlashAttention)]
    others = {id(config) for module, config in stay if why_not_interface(module) is None}
    memo = {key: named(copy.copy(config)) for key, config in ours.items() if key not in others}
    if not memo:
        return
    for _, config in held:
        _with_copies(config, memo)
    yield from ((module, memo[id(config)]) for module, config in held if id(config) in memo)


def _with_copies(config: Any, memo: dict[int, Any]) -> Any:
    """The copy of a configuration that memo, by id, has; a new copy of one that holds others with copies; else itself.

    Dictionaries and lists are those of the original, so that what is changed in them stays when the model is unpatched.
    """
    parts = {name: one for name, one in getattr(config, "__dict__", {}).items() if isinstance(one, PreTrainedConfig)}
    new = {name: _with_copies(one, memo) for name, one in parts.items()}
    new = {name: one for name, one in new.items() if one is not parts[name]}
    if new:
        vars(memo.setdefault(id(config), copy.copy(config))).update(new)
    return memo.get(id(config), config)


def _config(module: nn.Module) -> Any:
    return vars(module).get("replaced_config", vars(module).get("config"))


def why_not_interface(module: nn.Module) -> str | None:
    """Why a module's attention cannot go through transformers' attention interface; None where it does."""
    cls = getattr(type(module), "replaced_class", type(module))
    forward: Any = getattr(cls, "forward", None)
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if "ALL_ATTENTION_FUNCTIONS" in names and hasattr(getattr(module, "config", None), SETTING):
        return None
    return f"{cls.__name__} computes its scores itself, not through transformers' attention interface"


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface. Masks as above; window and padding are in them.

    position_bias[B or 1, Hq or 1, L, S]: added to the scores. s_aux[Hq]: attention sinks. Gradients and dropout are
    torch's own.
    """
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
    if dropout or (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)):
        return _differentiable(*args, scale, dropout)[..., :size], None
    wanted = getattr(module, "implementation", None)
    with nullcontext() if wanted is None else dispatch.forced(wanted):
        return flash_attention(*args, scale)[..., :size], None


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
        return None, _joined(mask[..., :keys], bias), False, 0
    if mask.shape[2]:
        return mask[:, 0], bias, causal, 0
    return None, bias, length > 1 or mask.shape[3] > 0, mask.shape[3]


def _of_one_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The three with zeros behind the smaller heads, of keys or of values: they add nothing to the scores."""
    more = value.shape[-1] - query.shape[-1]
    if more > 0:
        return functional.pad(query, (0, more)), functional.pad(key, (0, more)), value
    return query, key, functional.pad(value, (0, -more)) if more else value


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None, bias: Tensor | None, sinks: Tensor | None, causal: bool,
    window: int, softcap: float, scaling: float, dropout: float,
) -> Tensor:  # fmt: skip
    """As the operation, in torch's own functions, which have gradients."""
    if softcap or sinks is not None:
        if dropout:
            raise KernelError("attention with a softcap or sinks has no dropout here: set attention_dropout to 0")
        return by_eager(q, k, v, ranges, bias, sinks, causal, window, softcap, scaling)
    group, length, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    plain = ranges is None and bias is None and causal and not window and length == keys
    mask = None if plain else combined(visible(length, keys, ranges, causal, window, q), bias, q.dtype)
    y = functional.scaled_dot_product_attention(q, k, v, mask, dropout, plain, scale=scaling)
    return y.transpose(1, 2)


def _joined(mask: Tensor, bias: Tensor | None) -> Tensor:
    """A mask of other implementations and a bias of the scores as one."""
    if bias is None:
        return mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, device: Any = "cpu", **options: Any,
) -> Tensor | None:  # fmt: skip
    """transformers' mask interface: the mask of attention_forward; arguments as of transformers' sdpa_mask."""
    given = {
        "batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "local_size": local_size, "device": device, **options,
        "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False,
    }  # fmt: skip
    if _unread(q_length, q_offset, device):
        return sdpa_mask(q_length=q_length, q_offset=q_offset, **given)
    padded = attention_mask is not None and not bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())
    whole = not padded and (attention_mask is None or attention_mask.shape[-1] >= kv_length + kv_offset)
    last = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    # as many keys as a chunk may lie in two of them
    near = local_size is None or kv_length < local_size
    if whole and last and allow_is_causal_skip and near:
        plain = q_length in (1, kv_length)
        return None if plain else torch.empty(1, 1, 0, 0, dtype=torch.int32, device=device)
    if whole and allow_is_bidirectional_skip and near:
        return None
    ranges = _ranges(q_length, q_offset, given)
    if ranges is None:
        return sdpa_mask(q_length=q_length, q_offset=q_offset, **given)
    if whole and last and local_size is not None and _is_window(ranges, kv_length, local_size):
        return torch.empty(1, 1, 0, local_size, dtype=torch.int32, device=device)
    return ranges


def _unread(q_length: int, q_offset: Any, device: Any) -> bool:
    """Whether no value of a mask may be read, since the call is compiled, captured in a graph, or will be: a step over
    a static cache warms up the kernels that its capture launches."""
    step = q_length == 1 and isinstance(q_offset, Tensor)
    if step or torch.compiler.is_compiling():
        return True
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ranges(q_length: int, q_offset: Any, given: dict[str, Any]) -> Tensor | None:
    """int32 [B, 1, L, 2]: from the first key that each query sees to the one after the last; None where a query sees
    keys with holes between them, or heads differ."""
    rows = max(1, PART // max(1, given["batch_size"] * given["kv_length"]))
    keys = torch.arange(given["kv_length"], device=given["device"])
    parts, whole = [], []
    for start in range(0, q_length, rows):
        seen = sdpa_mask(q_length=min(rows, q_length - start), q_offset=q_offset + start, **given)
        if seen.shape[1] != 1:
            return None
        low = seen.to(torch.uint8).argmax(-1)
        high = low + seen.sum(-1)
        whole.append((seen == (keys >= low[..., None]) & (keys < high[..., None])).all())
        parts.append(torch.stack((low, high), -1).to(torch.int32))
    if not parts or not bool(torch.stack(whole).all()):
        return None
    return torch.cat(parts, 2)


def _is_window(ranges: Tensor, keys: int, window: int) -> bool:
    """Whether the ranges are those of a causal window, the last query being the last key."""
    high = torch.arange(keys - ranges.shape[2], keys, device=ranges.device) + 1
    due = torch.stack(((high - window).clamp(min=0), high), -1)
    return bool((ranges == due).all())
