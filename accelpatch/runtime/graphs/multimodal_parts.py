"""The parts of a multimodal model in a prompt: the language model runs by fused layers, towers as captured graphs.

The model's own forward inserts the outputs of its towers into the embeddings of the text, and calls the language model
with the embeddings of all tokens instead of ids. A tower is captured as a graph after enough calls of the same shapes,
short prompts by buckets of lengths (embedded_prompts.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from accelpatch.fusion.cache_call import CacheCall
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.rotary import of_one_axis
from accelpatch.fusion.spread import computes_on
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.models.multimodal import is_multimodal
from accelpatch.runtime import cache_form
from accelpatch.runtime.graphs.calls import captured_outputs
from accelpatch.runtime.graphs.fused_forward import HIDDEN_STATES, UNASKED, asks, reads_blind_tokens

FORWARD = "fused layers of a prompt's embeddings"
EMBEDDINGS = "inputs_embeds"
# The last one is an argument of the head, but some models pass on all of their arguments.
SUPPORTED = (EMBEDDINGS, "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep")
#: arguments that change nothing where they have these values
PLAIN = {**UNASKED, HIDDEN_STATES: False}
#: transformers' names of masks -> whether they are of layers with a window
MASKS = {"full_attention": False, "sliding_attention": True}
# Of Qwen3-VL: which tokens are those of pictures, and what is added to them after each of the first layers.
DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")


def part_outputs(runtime: Any, model: Any, part: Any, given: Mapping[str, Any]) -> Any:
    """Outputs of a call of a part of a multimodal model; None where the part's modules must run."""
    if not is_multimodal(model):
        return None
    decoder = model.get_decoder()
    if decoder is part:
        return language_outputs(runtime, model, part, given)
    holds_it = any(one is decoder for one in part.modules())
    return None if holds_it else captured_outputs(runtime, part, given)


def why_not(part: Any, given: Mapping[str, Any]) -> str | None:
    """Why the modules of a language model, `part`, must run a call with these arguments; None where fused layers can.

    Its own configuration decides what the arguments leave open, as in transformers.
    """
    for name, value in given.items():
        if name not in (*SUPPORTED, *DEEPSTACK) and value is not None and value is not PLAIN.get(name):
            return f"{name} was given"
    for name, plain in (*PLAIN.items(), ("is_causal", True)):
        if given.get(name) is None and getattr(part.config, name, plain) is not plain:
            return f"the configuration asks for {name}"
    embeds, mask, positions, cache = (given.get(name) for name in SUPPORTED[:4])
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or embeds.shape[1] < 2:
        return "no embeddings of several tokens"
    if cache is not None and (reason := cache_form.why_not(cache)):
        return reason
    past = 0 if cache is None else cache.get_seq_length()
    if reason := _of_masks(mask, len(embeds), embeds.shape[1], past):
        return reason
    if positions is not None and (
        not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dim() not in (2, 3)
    ):
        return "positions of another form than [B, L] or [3, B, L]"
    if positions is not None and mask is None and cache is None and not asks(part, given, "use_cache"):
        return "positions of packed texts"  # transformers then looks for several texts in a row
    return None


def _of_masks(mask: Any, rows: int, length: int, past: int) -> str | None:
    given = _by_kind(mask)
    if given is not None:
        fit = given.keys() <= MASKS.keys() and all(
            isinstance(one, Tensor) and one.shape in ((rows, 1, length, length), (1, 1, length, length))
            for one in given.values()
        )
        return None if fit and not past else "attention masks of another form than [B, 1, L, L], or over a cache"
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (rows, past + length)):
        return "an attention mask of another shape than [B, L]"
    return None


def _by_kind(mask: Any) -> dict[str, Any] | None:
    """Masks by transformers' names; None where none says which token sees which."""
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return {"full_attention": mask}
    return mask if isinstance(mask, dict) else None


def language_outputs(runtime: Any, model: Any, part: Any, given: Mapping[str, Any]) -> BaseModelOutputWithPast | None:
    """Normalised hidden states of the language model after a prompt's embeddings, by fused layers over the caller's
    cache; None where its modules must run."""
    if not is_eager() or wants_gradient(model.parameters()) or torch.is_grad_enabled():
        return None
    if why_not(part, given) is not None or not runtime.lock.acquire(blocking=False):
        return None
    try:
        fused, watched = runtime.fused(model)
        if fused is None or not fused.places - set(watched) or fused.by_length:
            return None
        if given[EMBEDDINGS].dtype != fused.dtype:
            return None
        made = DynamicCache(config=part.config) if asks(part, given, "use_cache") else None
        call = _call(fused, given, made if given.get(CACHE) is None else given[CACHE])
        if call is None or (call.cache is not None and cache_form.misfit(call.cache, fused.cached) is not None):
            return None
        if fused.both_ways and call.masks is None:  # without masks each token sees the later ones too
            return None
        blind = any(not bool(one.any(-1).all()) for one in (call.masks or {}).values())
        call.blind = blind or reads_blind_tokens(fused, {}, call, hidden=True)
        runtime.paths[FORWARD + fused.exceptions_with(watched)] += 1
        normal = _from_short(runtime, fused, watched, call, given)
        if normal is not None:
            return BaseModelOutputWithPast(last_hidden_state=normal, **{CACHE: call.cache})
        x = fused.positioned(given[EMBEDDINGS], call.positions)
        x, deep = _first_layers(fused, x, call, watched, *(given.get(name) for name in DEEPSTACK))
        rest = range(deep, len(fused.layers))
        normal = fused.normal(*fused.run(x, call, watched, places=rest))
        return BaseModelOutputWithPast(last_hidden_state=normal.view(given[EMBEDDINGS].shape), **{CACHE: call.cache})
    finally:
        runtime.lock.release()


def _from_short(
    runtime: Any, fused: FusedModel, watched: Sequence[int], call: CacheCall, given: Mapping[str, Any]
) -> Tensor | None:
    """Normalised hidden states of a prompt by a captured one; None where it has none."""
    embeds, shown, added = given[EMBEDDINGS], *(given.get(name) for name in DEEPSTACK)
    added = () if shown is None else added or ()
    if watched or embeds.device != computes_on(fused.embedding):
        return None
    with runtime.alone() as alone:
        short = runtime.captured.embedded_prompts(fused).of(embeds, call, len(added)) if alone else None
        return None if short is None else short(embeds, call, shown, added)


def _first_layers(
    fused: FusedModel, x: Tensor, call: CacheCall, watched: Sequence[int], shown: Tensor | None, added: Any
) -> tuple[Tensor, int]:
    """Run the first layers, after which outputs of a tower are added: (the rows after them, how many layers ran).

    shown[B, L]: marks the M tokens of pictures. added: for each of these layers the rows [M, K] that are added to
    those of the M tokens.
    """
    if shown is None or not added:
        return x, 0
    rows = shown.flatten().nonzero()[:, 0]
    for place, one in enumerate(added):
        x, pending = fused.run(x, call, watched, places=[place])
        x = x.clone() if pending is None else x + pending
        x.index_add_(0, rows.to(x.device), one.to(x.device, x.dtype))
    return x, len(added)


def _call(fused: FusedModel, given: Mapping[str, Any], cache: Any) -> CacheCall | None:
    """The CacheCall for these arguments; None for positions that differ by axis, where the layers do not support
    them."""
    embeds, mask = given[EMBEDDINGS], given.get("attention_mask")
    past, axes = 0 if cache is None else cache.get_seq_length(), None
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(past, past + embeds.shape[1])[None]
    positions = positions.to(embeds.device)
    if (flat := of_one_axis(positions)) is None:
        if fused.axes is None or fused.spread is not None:
            return None
        axes = positions[-3:].expand(3, *embeds.shape[:2])
        flat = axes[0]
    masks = None
    if (given_masks := _by_kind(mask)) is not None:
        masks, mask = {MASKS[name]: _booleans(one).to(embeds.device) for name, one in given_masks.items()}, None
        if {layer.attention.window > 0 for layer in fused.fused_layers} - masks.keys():
            return None
    mask = None if mask is None or bool(mask.all()) else mask.to(embeds.device)
    places = flat.expand(embeds.shape[:2]).contiguous()
    return CacheCall(fused.decoder(), places, mask, cache, past, axes=axes, axis=fused.axes, masks=masks)


def _booleans(mask: Tensor) -> Tensor:
    """A mask as booleans, true for visible keys, where transformers' masks are true or 0."""
    return mask if mask.dtype == torch.bool else mask == 0
