"""One call of a patched model by its fused layers over the cache of transformers: model(ids), beams, assistants, loss.

What generate()'s captured steps do for one loop, this does for every other caller: the same products and norms, without
a graph. Layers that somebody watches by a hook run their modules, all others are fused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.fused_product import normed
from accelpatch.kernels.operation import is_eager, refusing_gradient
from accelpatch.kernels.prompt_attention import turn_
from accelpatch.runtime import attention_facts
from accelpatch.runtime.captured_cache import why_not as cache_why_not
from accelpatch.runtime.fused_layer import FusedModel
from accelpatch.runtime.native_weights import layer_type

FORWARD = "fused forward"
TAKEN = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "labels")
HIDDEN_STATES = "output_hidden_states"
UNASKED = {"return_dict": True, "output_attentions": False}


def why_not(model: Any, given: Mapping[str, Any]) -> str | None:
    """Why a call must run the modules; None where fused layers may. given: the call's arguments by name."""
    for name, value in given.items():
        if name not in (*TAKEN, HIDDEN_STATES) and value is not None and value is not UNASKED.get(name):
            return f"{name} was given"
    for name, unasked in UNASKED.items():
        if given.get(name) is None and getattr(model.config, name, unasked) is not unasked:
            return f"the configuration asks for {name}"
    ids, mask, positions, cache = (given.get(name) for name in TAKEN[:4])
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return "no ids"
    if cache is not None and (reason := cache_why_not(cache) or _unused(model, given)):
        return reason
    past = 0 if cache is None else cache.get_seq_length()
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (ids.shape[0], past + ids.shape[1])):
        return "an attention mask of another form than the ids"
    return _of_positions(positions, ids, packed=mask is None and not uses_cache(model, given)) or _of_config(
        model, given
    )


def _of_positions(positions: Any, ids: Tensor, packed: bool) -> str | None:
    """packed: whether transformers takes positions that begin anew for several texts in one row."""
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or positions.shape not in (ids.shape, (1, ids.shape[1])):
        return "positions of another form than the ids"
    if positions.is_floating_point() or positions.dtype == torch.bool:
        return "positions that are no integers"
    return "positions of packed texts" if packed else None


def _of_config(model: Any, given: Mapping[str, Any]) -> str | None:
    kept = given.get("logits_to_keep", 0)
    places = isinstance(kept, Tensor) and kept.dim() == 1 and kept.dtype in (torch.int64, torch.int32)
    if type(kept) is not int and not places:
        return "logits_to_keep of another form"
    return None if getattr(model.config, "is_causal", True) is not False else "the configuration looks ahead"


def wants_hidden_states(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether the call wants what comes into and out of each layer."""
    wanted = given.get(HIDDEN_STATES)
    return bool(getattr(model.config, HIDDEN_STATES, False) if wanted is None else wanted)


def _unused(model: Any, given: Mapping[str, Any]) -> str | None:
    """Families differ in whether they give back a cache that they were told not to use."""
    return None if uses_cache(model, given) else "a cache, and use_cache: false"


def uses_cache(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether the call has a cache of its own, or goes on with its caller's."""
    use_cache = given.get("use_cache")
    return bool(getattr(model.config, "use_cache", True) if use_cache is None else use_cache)


def fused_outputs(runtime: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """What a call of the model gives by the fused layers of its runtime; None where the modules must run it."""
    if not is_eager() or why_not(model, given) is not None:
        return None
    if not runtime.lock.acquire(blocking=False):  # another thread's generate(), which may wait for this call
        return None
    try:
        fused, watched = runtime.fused(model)
    finally:
        runtime.lock.release()
    if fused is None or fused.no_prompts is not None or len(watched) == len(fused.layers):
        return None
    if torch.is_grad_enabled() and (
        watched or wants_hidden_states(model, given) or wants_gradient(given.get("past_key_values"))
    ):
        return None  # the modules refuse the gradient of what comes in from outside, and of what goes out
    runtime.paths[FORWARD + (f", but modules in layers {watched}: a hook inside" if watched else "")] += 1
    return fused_forward(model, fused, watched, given)


@dataclass(eq=False)
class Call:
    """What the layers of one call share. positions[B, L]; mask[B, past + L] or None; past: tokens cached before."""

    positions: Tensor
    mask: Tensor | None
    cache: Any
    past: int

    def __post_init__(self) -> None:
        self._seen: dict[tuple[int, int, int], Tensor | None] = {}

    def attend(self, qkv: Tensor, shape: AttentionShape, place: int) -> Tensor:
        """y[B L, Hq D] of qkv[B L, (Hq + 2 Hkv) D], which is written to; keys and values go into the cache."""
        batch, length = self.positions.shape
        first = self.first(place)
        new = qkv.new_empty(2, batch, shape.kv_heads, length, shape.size)
        turn_(qkv, self.positions, new[0], new[1], shape)
        k, v = self.cached(new[0], new[1], place)
        q = qkv.view(batch, length, -1, shape.size)[:, :, : shape.heads].transpose(1, 2)
        seen, group = self.seen(k.shape[2], first, shape.window), shape.heads // shape.kv_heads
        if seen is not None and group > 1:  # no fast form of torch's takes both a mask and groups
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None and length > 1, scale=shape.scaling, enable_gqa=group > 1
        )
        return y.transpose(1, 2).reshape(batch * length, -1)

    def cached(self, k: Tensor, v: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with these new ones, which an empty layer takes as they are."""
        if self.cache is None:
            return k, v
        layer: Any = self.cache.layers[place] if place < len(self.cache.layers) else None
        if type(layer) is DynamicLayer and not layer.is_initialized:
            layer.dtype, layer.device, layer.is_initialized = k.dtype, k.device, True
            layer.keys, layer.values = k, v
            return k, v
        both: tuple[Tensor, Tensor] = self.cache.update(k, v, place)
        return both

    def first(self, place: int) -> int:
        """The place in the text of the first key that a layer will see."""
        if self.cache is None or place >= len(self.cache.layers):
            return 0
        return int(self.cache.layers[place].get_mask_sizes(self.positions.shape[1])[1])

    def seen(self, keys: int, first: int, window: int) -> Tensor | None:
        """[B or 1, 1, L, keys]: which keys each token sees; None where it is all of those up to itself."""
        key = keys, first, window
        if key not in self._seen:
            self._seen[key] = self._make(keys, first, window)
        return self._seen[key]

    def _make(self, keys: int, first: int, window: int) -> Tensor | None:
        length = self.positions.shape[1]
        far = 0 < window < self.past + length - first
        if self.mask is None and not far and (length == 1 or self.past == 0):
            return None
        device = self.positions.device
        at = torch.arange(self.past, self.past + length, device=device)[:, None]
        key = torch.arange(first, first + keys, device=device)
        seen = key <= at
        if window:
            seen = seen & (at - key < window)
        if self.mask is not None:
            seen = seen & self.mask[:, None, first : first + keys].ne(0)
        return seen.view(-1, 1, length, keys)


def wants_gradient(cache: Any) -> bool:
    """Whether somebody wants the gradient of what a cache holds."""
    layers = [] if cache is None else [layer for layer in cache.layers if layer.is_initialized]
    return any(tensor.requires_grad for layer in layers for tensor in (layer.keys, layer.values))


def fused_forward(model: Any, fused: FusedModel, watched: Collection[int], given: Mapping[str, Any]) -> Any:
    """The outputs of the call, where `why_not` has no reason. watched: numbers of the layers that run their modules."""
    ids, cache, mask = given["input_ids"], given.get("past_key_values"), given.get("attention_mask")
    if cache is None and uses_cache(model, given):
        cache = DynamicCache(config=model.config)
    past = 0 if cache is None else cache.get_seq_length()
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
    mask = None if mask is None or bool(mask.all()) else mask.to(ids.device)
    call = Call(positions.to(ids.device).expand(ids.shape).contiguous(), mask, cache, past)
    kept = given.get("logits_to_keep", 0)
    kept = slice(-kept, None) if isinstance(kept, int) else kept
    seen: list[Tensor] | None = [] if wants_hidden_states(model, given) else None
    with torch.no_grad():
        normal = _hidden(model, fused, watched, ids, call, seen).view(*ids.shape, -1)
        hidden = None if seen is None else (*(one.view(normal.shape) for one in seen), normal)
        normal = normal[:, kept]
        logits = fused.logits_of(normal.flatten(0, 1)).view(*normal.shape[:2], -1)
    trained = next((p for p in model.parameters() if p.requires_grad), None) if torch.is_grad_enabled() else None
    if trained is not None:
        logits = refusing_gradient(logits, trained)
    loss = None
    if (labels := given.get("labels")) is not None:
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=hidden)


def _hidden(
    model: Any, fused: FusedModel, watched: Collection[int], ids: Tensor, call: Call, seen: list[Tensor] | None
) -> Tensor:
    """The rows [B L, K] that go into the head. seen: where those that go into the layers are put, if wanted."""
    x, pending = model.model.embed_tokens(ids).flatten(0, 1), None
    for place, layer in enumerate(fused.layers):
        if pending is not None and (place in watched or seen is not None):
            x, pending = x + pending, None
        if seen is not None:
            seen.append(x)
        if place in watched:
            x = _module(model.model, place, x.view(*ids.shape, -1), call)
            continue

        def attend(qkv: Tensor, shape: AttentionShape = layer.attention, place: int = place) -> Tensor:
            return call.attend(qkv, shape, place)

        x, pending = layer.rows(x, pending, attend)
    normal: Tensor = normed(fused.norm, x, pending)[0]
    return normal


def _module(decoder: Any, place: int, stream: Tensor, call: Call) -> Tensor:
    """A layer's own call: stream[B, L, K] -> [B L, K]."""
    layer, length = decoder.layers[place], stream.shape[1]
    attention = layer.self_attn
    kinds = () if hasattr(decoder.rotary_emb, "inv_freq") else (layer_type(layer),)
    first = call.first(place)
    seen = call.seen(call.past + length - first, first, attention_facts.window(attention))
    if seen is None and length > 1:
        seen = torch.ones(length, length, dtype=torch.bool, device=stream.device).tril()[None, None]
    if seen is not None and attention.config._attn_implementation == "eager":
        seen = torch.zeros_like(seen, dtype=stream.dtype).masked_fill_(~seen, torch.finfo(stream.dtype).min)
    given = {
        "attention_mask": seen, "position_ids": call.positions, "past_key_values": call.cache,
        "use_cache": call.cache is not None, "position_embeddings": decoder.rotary_emb(stream, call.positions, *kinds),
    }  # fmt: skip
    made = layer(stream, **given)
    return (made if isinstance(made, Tensor) else made[0]).flatten(0, 1)
