"""One more token a row of an encoder-decoder, by a captured step, and the first tokens of its decoder, by a graph: for
beam search, and loops of a program's own.

The tokens in the caller's cache move into the step's, and stay there, as in single_token.py; so do the keys and values
of the cross-attention, which beam search need not reorder where all beams of a text read the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.runtime.cache_contents import attached
from accelpatch.runtime.cache_form import misfit
from accelpatch.runtime.graphs.encoder_decoder import (
    MASK,
    OUTPUTS,
    EncoderDecoderStep,
    Source,
    call_why_not,
    hidden_of,
    hides_all,
)
from accelpatch.runtime.graphs.encoder_decoder_prompt import (
    CAPTURED_PROMPT,
    CapturedPrompts,
    begin_caches,
    prompt_why_not,
)
from accelpatch.runtime.graphs.kv_cache import NotCaptured, capacity_for, grown
from accelpatch.runtime.graphs.step import CAPTURED

IDS, OWN_MASK, POSITIONS = "decoder_input_ids", "decoder_attention_mask", "decoder_position_ids"
#: arguments of a step; others may only say what is so anyway
SUPPORTED = frozenset({IDS, OWN_MASK, POSITIONS, MASK, OUTPUTS, CACHE})
UNASKED: Mapping[str, Any] = {
    "use_cache": True, "return_dict": True, "output_attentions": False, "output_hidden_states": False,
}  # fmt: skip


def why_not(model: Any, given: Mapping[str, Any]) -> str | None:
    """Why a call must run the modules; None where a captured step can. given: the call's arguments by name."""
    for name, value in given.items():
        if name not in SUPPORTED and value is not None and value is not UNASKED.get(name):
            return f"{name} was given"
    for name, unasked in UNASKED.items():
        if given.get(name) is None and getattr(model.config, name, unasked) is not unasked:
            return f"the configuration asks for {name}"
    ids = given.get(IDS)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.dtype != torch.int64:
        return "no ids"
    if reason := call_why_not(model, given):
        return reason
    own, cross, rows = given[CACHE].self_attention_cache, given[CACHE].cross_attention_cache, len(ids)
    length, hidden, mask = own.get_seq_length(), hidden_of(given), given.get(OWN_MASK)
    if len(hidden) != rows or hidden.device != ids.device:
        return "its encoder's output is of other rows, or elsewhere"
    if not length:
        return prompt_why_not(given)
    if ids.shape[1] != 1:
        return "it is not one more token of each row"
    if len(own.layers) != len(cross.layers) or not all(given[CACHE].is_updated.values()):
        return "its cache holds nothing"
    if cross.get_seq_length() != hidden.shape[1]:
        return "its cache is of another output of an encoder"
    if mask is not None and (mask.shape != (rows, length + 1) or not bool(mask[:, -1].all())):
        return "a mask of another shape than the tokens, or a new token that it hides"
    return None


def one_token(runtime: Any, model: Any, given: Mapping[str, Any]) -> Seq2SeqLMOutput | None:
    """Outputs of a call by a captured step, or by a graph of first tokens; None where the modules must run."""
    if not is_eager() or wants_gradient(model.parameters()) or why_not(model, given) is not None:
        return None
    if not runtime.lock.acquire(blocking=False):  # another thread's generate(), which may wait for this call
        return None
    try:
        if not runtime.ready(model, given):
            return None
        with runtime.alone(), torch.no_grad():
            follows = given[CACHE].self_attention_cache.get_seq_length()
            logits = (_stepped if follows else _begun)(runtime, model, given)
    finally:
        runtime.lock.release()
    if logits is None:
        return None
    return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=hidden_of(given), **{CACHE: given[CACHE]})


def _stepped(runtime: Any, model: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Logits [B, 1, V]; None where there is no step."""
    captured, ids, cache = runtime.captured, given[IDS], given[CACHE]
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    past, source = own.get_seq_length(), captured.decoder.source(given)
    if misfit(own, captured.decoder.own) or misfit(cross, captured.decoder.cross):
        return None
    step = _step(runtime, model, len(ids), past, own, source)
    if step is None:
        return None
    contents, others = attached(own), attached(cross)
    if contents is None or not step.holds(contents):
        if own.layers[0].keys.shape[0] != len(ids):
            return None
        contents = step.attach(own)
    if not step.encoded.holds(others):
        if cross.layers[0].keys.shape[0] != len(ids) or hides_all(given):
            return None
        step.encoded.take(cross, given)
    else:
        step.encoded.show(given)
    positions, mask = given.get(POSITIONS), given.get(OWN_MASK)
    if positions is None:
        positions = torch.tensor(past)
    step.batch.tokens.copy_(ids[:, 0])
    step.batch.begin(past, positions)
    step.show(past, None if mask is None else mask[:, :-1])
    step.replay()
    contents.grow()
    runtime.paths[CAPTURED] += 1
    runtime.paths[captured.way(step)] += 1
    return step.batch.logits.to(model.dtype, copy=True)[:, None]


def _begun(runtime: Any, model: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Logits [B, T, V] after the decoder's first tokens, which a step's caches then hold; None where modules run."""
    captured, ids, cache = runtime.captured, given[IDS], given[CACHE]
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    if misfit(own, captured.decoder.own) or misfit(cross, captured.decoder.cross) or hides_all(given):
        return None
    step = _step(runtime, model, len(ids), ids.shape[1], own, captured.decoder.source(given))
    if step is None:
        return None
    if step.first_tokens is None:
        step.first_tokens = CapturedPrompts()
    step.vacate()
    step.encoded.vacate()
    step.encoded.show(given)
    graph = step.first_tokens.of(step, ids.shape[1], captured.graph(step.batch.device))
    if graph is None:
        return None
    graph(ids)
    begin_caches(cache, step)
    step.attach(own).length = ids.shape[1]
    step.encoded.attach(cross, given).length = hidden_of(given).shape[1]
    runtime.paths[CAPTURED_PROMPT] += 1
    assert graph.logits is not None
    return graph.logits.clone()


def _step(runtime: Any, model: Any, rows: int, past: int, own: Any, source: Source) -> EncoderDecoderStep | None:
    """The step for one more token after `past`; None where there is none."""
    captured, longest = runtime.captured, runtime.max_length
    key = rows, (source,)
    if key in captured.uncaptured or captured.why_not is not None or (longest is not None and past >= longest):
        return None
    contents = attached(own)
    full = contents is not None and contents.static.layers[0].keys.shape[2] == past
    try:
        step = runtime.step(
            model, rows, grown(past, longest) if full else capacity_for(past + 1, longest), source=source
        )
    except (NotCaptured, torch.OutOfMemoryError):
        captured.uncaptured.add(key)
        return None
    assert isinstance(step, EncoderDecoderStep)
    return step
