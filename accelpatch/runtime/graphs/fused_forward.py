"""One model call by its fused layers over transformers' cache: for model(ids), beam search, assisted decoding, loss.

What captured steps do for generate()'s loop, this does for all other callers, with the same kernels. Repeated short
prompts become graphs (prefill.py). Layers with hooks run their modules, all others are fused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from accelpatch.fusion.cache_call import CacheCall, KeptCall
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.rotary import by_axes, of_one_axis
from accelpatch.fusion.spread import computes_on
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.models.multimodal import configs_of_call, first_position, is_multimodal, unused_by_steps
from accelpatch.models.multimodal import outputs_of as own_outputs
from accelpatch.runtime import cache_form
from accelpatch.runtime.cache_contents import attached
from accelpatch.runtime.graphs import single_token
from accelpatch.runtime.graphs.capture import GraphOf
from accelpatch.runtime.graphs.prefill import Prompts, ShortPrompt, captured_tokens

FORWARD = "fused forward"
SUPPORTED = ("input_ids", "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "labels")
HIDDEN_STATES = "output_hidden_states"
INTEGERS = (torch.int64, torch.int32)
UNASKED = {"return_dict": True, "output_attentions": False}


def why_not(model: Any, given: Mapping[str, Any]) -> str | None:
    """Why a call must run the modules; None where fused layers can. given: the call's arguments by name."""
    known = {*SUPPORTED, HIDDEN_STATES, *(unused_by_steps(model) if _length(given) == 1 else ())}
    for name, value in given.items():
        if name not in known and value is not None and value is not UNASKED.get(name):
            return f"{name} was given"
    for name, unasked in UNASKED.items():
        if given.get(name) is None and getattr(model.config, name, unasked) is not unasked:
            return f"the configuration asks for {name}"
    if type(_asked(model, given, HIDDEN_STATES)) is not bool:
        return "hidden states of some layers alone"
    ids, mask, positions, cache = (given.get(name) for name in SUPPORTED[:4])
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.dtype not in INTEGERS:
        return "no ids"
    if cache is not None and (reason := cache_form.why_not(cache)):
        return reason
    if cache is not None and not asks(model, given, "use_cache"):  # families differ in whether they return it
        return "a cache, and use_cache: false"
    past = 0 if cache is None else cache.get_seq_length()
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (ids.shape[0], past + ids.shape[1])):
        return "an attention mask of another shape than the ids"
    if is_multimodal(model) and (reason := _of_media(model, given, past)):
        return reason
    return _of_positions(positions, ids, packed=mask is None and not asks(model, given, "use_cache")) or _of_config(
        model, given
    )


def _length(given: Mapping[str, Any]) -> int:
    ids = given.get("input_ids")
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.dim() else 0


def _of_media(model: Any, given: Mapping[str, Any], past: int) -> str | None:
    """Why a call of a multimodal model needs the modules, whose language model runs alone."""
    own, inner = configs_of_call(model)
    for name, unasked in {**UNASKED, HIDDEN_STATES: False, "use_cache": True, "is_causal": True}.items():
        if given.get(name) is None and getattr(own, name, unasked) != getattr(inner, name, unasked):
            return f"configurations that differ in {name}"
    if given.get("labels") is not None:
        return "labels of a multimodal model"
    if past and given.get("position_ids") is None and by_axes(getattr(model.get_decoder(), "rotary_emb", None)):
        return "no positions, which pictures before may have moved"
    if given.get("position_ids") is None and (first := first_position(model)):
        return f"no positions, which begin at {first}"
    ids, table = given["input_ids"], model.get_input_embeddings()
    if ids.shape[1] > 1 and bool((ids >= table.num_embeddings).any()):
        return "tokens of pictures without pictures"
    return None


def _of_positions(positions: Any, ids: Tensor, packed: bool) -> str | None:
    """Why these positions need the modules. packed: whether transformers accepts several sequences in one row."""
    if positions is None:
        return None
    if isinstance(positions, Tensor) and positions.dim() == 3 and ids.shape[1] == 1:
        positions = of_one_axis(positions)
    if not isinstance(positions, Tensor) or positions.shape not in (ids.shape, (1, ids.shape[1])):
        return "positions of another shape than the ids"
    if positions.is_floating_point() or positions.dtype == torch.bool:
        return "positions that are no integers"
    return "positions of packed texts" if packed else None


def _of_config(model: Any, given: Mapping[str, Any]) -> str | None:
    kept = given.get("logits_to_keep", 0)
    places = isinstance(kept, Tensor) and kept.dim() == 1 and kept.dtype in INTEGERS
    if type(kept) is not int and not places:
        return "logits_to_keep of another type"
    return None if getattr(model.config, "is_causal", True) is not False else "the configuration is not causal"


def asks(model: Any, given: Mapping[str, Any], name: str) -> bool:
    """Whether a call asks for a cache (`use_cache`) or hidden states: by its argument, else by the configuration."""
    return bool(_asked(model, given, name))


def _asked(model: Any, given: Mapping[str, Any], name: str) -> Any:
    asked = given.get(name)
    return getattr(model.config, name, name == "use_cache") if asked is None else asked


def fused_outputs(runtime: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """Outputs of a model call by the runtime's fused layers; None where the modules must run."""
    if not is_eager() or wants_gradient(model.parameters()) or why_not(model, given) is not None:
        return None
    if not runtime.lock.acquire(blocking=False):  # another thread's generate(), which may wait for this call
        return None
    try:
        runtime.use_format(given.get(CACHE))
        fused, watched = runtime.fused(model)
        if fused is None or not fused.places - set(watched):
            return None
        cache = given.get(CACHE)
        if cache is not None and cache_form.misfit(cache, fused.cached) is not None:
            return None
        hidden = asks(model, given, HIDDEN_STATES)
        if wants_gradient(_states_of(cache)) or (torch.is_grad_enabled() and (watched or fused.unfused or hidden)):
            return None  # the modules carry the gradient of what comes in from outside
        call = call_of(model, fused, given)
        call.blind = reads_blind_tokens(fused, given, call, hidden)
        ids = given["input_ids"]
        if not hidden and single_token.why_not(fused, ids, call) is None:
            with runtime.alone():
                logits = single_token.stepped(runtime, model, ids, call, tuple(watched))
            if logits is not None:
                return outputs_of(model, given, call, _kept(logits, given))
        if fused.no_prompts is not None:
            return None
        runtime.paths[FORWARD + fused.exceptions_with(watched)] += 1
        short = None if watched or hidden else short_prompt(runtime, fused, ids, call)
        if short is not None:
            with runtime.alone():
                normal = from_short(short, ids, call)
            return outputs_of(model, given, call, logits_of(fused, given, normal))
    finally:
        runtime.lock.release()
    return fused_forward(model, fused, watched, given, call)


def reads_blind_tokens(fused: FusedModel, given: Mapping[str, Any], call: CacheCall, hidden: bool) -> bool:
    """Whether the caller gets results of tokens that see no key: padding before a text, or a window behind one."""
    if call.mask is None:
        return False
    real = call.mask.ne(0).cumsum(1)
    blind = real == 0
    for window in {layer.attention.window for layer in fused.fused_layers} - {0}:
        before = torch.nn.functional.pad(real, (window, 0))[:, : real.shape[1]]
        blind = blind | (real == before)
    blind = blind[:, call.past :]
    return bool((blind if hidden else _kept(blind, given)).any())


def _states_of(cache: Any) -> list[Tensor]:
    """The tensors in a cache of the caller's own."""
    filled = [] if cache is None or attached(cache) else cache.layers
    return [tensor for layer in filled if layer.is_initialized for tensor in (layer.keys, layer.values)]


def call_of(model: Any, fused: FusedModel, given: Mapping[str, Any]) -> CacheCall:
    """The CacheCall for these arguments, for which `why_not` must have no reason."""
    ids, cache, mask = given["input_ids"], given.get(CACHE), given.get("attention_mask")
    if cache is None and asks(model, given, "use_cache"):
        cache = DynamicCache(config=model.config)
    past = 0 if cache is None else cache.get_seq_length()
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        if mask is not None and fused.positions is not None and fused.positions.of_mask:
            positions = (mask.long().cumsum(1) * mask - 1)[:, past:].long()
    mask = None if mask is None or bool(mask.all()) else mask.to(ids.device)
    positions = of_one_axis(positions)
    assert positions is not None
    return CacheCall(fused.decoder(), positions.to(ids.device).expand(ids.shape).contiguous(), mask, cache, past)


def fused_forward(
    model: Any, fused: FusedModel, watched: Collection[int], given: Mapping[str, Any], call: CacheCall
) -> Any:
    """The outputs of a call. watched: indices of the layers that run as modules."""
    ids = given["input_ids"]
    seen: list[Tensor] | None = [] if asks(model, given, HIDDEN_STATES) else None
    with torch.no_grad():
        normal = hidden_rows(fused, watched, ids, call, seen).view(*ids.shape, -1)
    hidden = None if seen is None else (*(one.view(normal.shape) for one in seen), normal)
    return outputs_of(model, given, call, logits_of(fused, given, normal), hidden)


def logits_of(fused: FusedModel, given: Mapping[str, Any], normal: Tensor) -> Tensor:
    """The logits that the caller keeps, from the normalised hidden states normal[B, L, K]."""
    normal = _kept(normal, given)
    with torch.no_grad():
        return fused.logits_of(normal.flatten(0, 1)).view(*normal.shape[:2], -1)


def _kept(rows: Tensor, given: Mapping[str, Any]) -> Tensor:
    kept = given.get("logits_to_keep", 0)
    return rows[:, slice(-kept, None) if isinstance(kept, int) else kept]


def outputs_of(model: Any, given: Mapping[str, Any], call: CacheCall, logits: Tensor, hidden: Any = None) -> Any:
    """The outputs of a call."""
    loss = None
    if (labels := given.get("labels")) is not None:
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
    return own_outputs(model, loss=loss, logits=logits, hidden_states=hidden, **{CACHE: call.cache})


def prompts_of(fused: FusedModel, graph: GraphOf) -> Prompts:
    """The captured short prompts of fused layers: normalised hidden states, and each layer's new[2, B, Hkv, L, D]."""

    def program(ids: Tensor, positions: Tensor, last: Tensor) -> tuple[Tensor, list[Tensor]]:
        call = KeptCall(fused.decoder(), positions, None, None, 0)
        rows = hidden_rows(fused, (), ids, call, None)
        return rows.view(*ids.shape, -1), call.kept

    return Prompts(program, graph, captured_tokens(fused))


def short_prompt(runtime: Any, fused: FusedModel, ids: Tensor, call: CacheCall) -> ShortPrompt | None:
    """The captured short prompt for a call; None where its prompt is long, padded, or continues a cache."""
    if call.mask is not None or call.past or fused.in_parts or ids.device != computes_on(fused.embedding):
        return None
    windows = [layer.attention.window for layer in fused.fused_layers if layer.attention.window]
    return runtime.captured.prompts(fused).of(ids, min(windows, default=None))


def from_short(short: ShortPrompt, ids: Tensor, call: CacheCall) -> Tensor:
    """Normalised hidden states [B, L, K] by a captured short prompt; keys and values go into the call's cache."""
    length = ids.shape[1]
    normal, kept = short(ids, call.positions)
    with torch.no_grad():
        if call.cache is not None:
            for place, new in enumerate(kept):
                call.cached(new[:, :, :, :length].clone(), place)
        return cast(Tensor, normal[:, :length].clone())


def hidden_rows(
    fused: FusedModel, watched: Collection[int], ids: Tensor, call: CacheCall, seen: list[Tensor] | None
) -> Tensor:
    """Normalised hidden states [B L, K], the head's input. seen: receives each layer's input, where wanted."""
    return fused.normal(*fused.run(fused.embedded(ids, call.positions), call, watched, seen))
