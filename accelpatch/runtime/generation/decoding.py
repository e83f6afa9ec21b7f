"""generate()'s loop for greedy decoding and sampling: over native CPU steps, or captured ones where the host samples.

It computes what transformers' own `_sample` does, with processors, criteria and streamers, but between two native steps
it only picks the token: no masks are concatenated, no inputs prepared, and the vocabulary is not searched for
suppressed end-of-sequence ids.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.generation.logits_process import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.spread import moves_only
from accelpatch.models.multimodal import prompt_arguments
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.cpu import encoder_decoder
from accelpatch.runtime.cpu.native_step import NativeRun, NativeRuntime, unknown

# Arguments of generate()'s model calls that the loop supports besides those of a step.
UNDERSTOOD = frozenset(
    {"attention_mask", CACHE, "position_ids", "use_cache", "logits_to_keep", "tokenizer", "inputs_embeds"}
)


def stock_loop_because(
    model: Any, config: Any, synced_gpus: bool, kwargs: dict[str, Any], understood: Collection[str] = UNDERSTOOD
) -> str | None:
    """Why transformers' own loop must run; None where `decode` can."""
    if reason := vars(model)[CODE].loop:
        return str(reason)
    if extra := unknown(kwargs, {*understood, *prompt_arguments(model)}):
        return f"the argument {extra}"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states were asked for"
    if synced_gpus or config.is_assistant or not kwargs.get("use_cache"):
        return "synchronised devices, an assistant, or no cache"
    if model._forward_hooks or model._forward_pre_hooks or ("forward" in vars(model) and not moves_only(model)):
        return "a hook on the model"  # which expects to see each call of the model
    if model._valid_auto_compile_criteria(kwargs, config):
        return "the model is compiled"
    return None


@torch.no_grad()
def decode(
    model: Any, runtime: NativeRuntime, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any,
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Continue ids[B, L] until `criteria` hold; returns ids, or transformers' class of outputs if configured."""
    result = GenerateEncoderDecoderOutput if encoder_decoder.encodes(model) else GenerateDecoderOnlyOutput
    return loop(NativeSteps(model, runtime), ids, processors, criteria, config, streamer, kwargs, result)


def native_loop_because(model: Any, config: Any, synced_gpus: bool, kwargs: dict[str, Any]) -> str | None:
    """Why transformers' own loop must run around native steps; None where `decode` can."""
    understood = encoder_decoder.UNDERSTOOD if encoder_decoder.encodes(model) else UNDERSTOOD
    return stock_loop_because(model, config, synced_gpus, kwargs, understood)


class Steps(Protocol):
    """What makes logits for the loop. kwargs: the model's arguments, with the cache, after a prompt."""

    @property
    def kwargs(self) -> dict[str, Any]: ...

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits [B, V] after the prompt ids[B, L]."""

    def next(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, V] after tokens[B], the last of `ids`."""


def loop(
    steps: Steps,
    ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
    kwargs: dict[str, Any],
    result: Any = GenerateDecoderOnlyOutput,
) -> Any:
    """The loop in which the host samples each token. steps: make the logits after a prompt, then after each token.

    result: the class of what is returned where a dictionary is wanted.
    """
    kept = _Kept(config, result)
    unfinished = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
    padding = config._pad_token_tensor if any(hasattr(one, "eos_token_id") for one in criteria) else None
    logits = steps.prompt(ids, config, kwargs)
    while True:
        scores = kept.scores(ids, logits, processors)
        if config.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        if padding is not None:
            tokens = tokens * unfinished + padding * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~criteria(ids, kept.all_scores)
        if streamer is not None:
            streamer.put(tokens.cpu())
        if not unfinished.any():
            break
        logits = steps.next(ids, tokens)
    if streamer is not None:
        streamer.end()
    return kept.result(ids, steps.kwargs.get(CACHE))


class NativeSteps:
    """Steps of a model with native decode steps.

    The prompt and the first step are calls of the model, which lay out its cache; the steps after that are native calls
    without one (`_run`), as long as nothing changes.
    """

    def __init__(self, model: Any, runtime: NativeRuntime):
        self.kwargs: dict[str, Any] = {}
        self._model, self._runtime = model, runtime
        self._run: NativeRun | None = None
        self.behind = 0  # native steps not yet counted in kwargs

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits [B, V] float32 after the prompt, owned by the caller."""
        outputs = self._model._prefill(ids, config, kwargs, is_first_iteration=True)
        return self._last_logits(outputs, kwargs)

    def next(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, V] float32 after `tokens`[B], the last ones of `ids`."""
        logits = self._run.logits(self._model, tokens) if self._run is not None else None
        if logits is not None:
            self.behind += 1
            return logits
        kwargs = self.kwargs
        if self.behind:
            known = CausalLMOutputWithPast(**{CACHE: kwargs[CACHE]})
            kwargs = self._updated(known, kwargs, self.behind)
            self.behind = 0
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        logits = self._last_logits(self._model(**inputs, return_dict=True), kwargs)
        self._run = self._runtime.run_of(kwargs)
        return logits

    def _updated(self, outputs: Any, kwargs: dict[str, Any], tokens: int = 1) -> dict[str, Any]:
        """The model's arguments after a call that gave `outputs`, or after several steps."""
        update, encodes = self._model._update_model_kwargs_for_generation, encoder_decoder.encodes(self._model)
        updated: dict[str, Any] = update(outputs, kwargs, is_encoder_decoder=encodes, num_new_tokens=tokens)
        return updated

    def _last_logits(self, outputs: Any, kwargs: dict[str, Any]) -> Tensor:
        self.kwargs = self._updated(outputs, kwargs)
        return outputs.logits[:, -1].to(copy=True, dtype=torch.float32)


class _Kept:
    """The scores and logits that the caller of generate() asks for besides the tokens."""

    def __init__(self, config: Any, result: Any):
        self._result = result
        self._as_dict = bool(config.return_dict_in_generate)
        self.all_scores: Any = () if self._as_dict and config.output_scores else None
        self._logits: Any = () if self._as_dict and config.output_logits else None

    def scores(self, ids: Tensor, logits: Tensor, processors: Any) -> Tensor:
        """The output of the processors for logits[B, V], which may be written into."""
        scores = logits if self._logits is None else logits.clone()
        if not all(_suppress(processor, ids.shape[1], scores) for processor in processors):
            scores = processors(ids, scores)
        if self.all_scores is not None:
            self.all_scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)
        return scores

    def result(self, ids: Tensor, cache: Any) -> Any:
        if not self._as_dict:
            return ids
        kept = {"scores": self.all_scores, "logits": self._logits, CACHE: cache}
        return self._result(sequences=ids, **kept)


def _suppress(processor: Any, length: int, scores: Tensor) -> bool:
    """Suppress the end-of-sequence ids in place, as `processor` would; False where it does anything else."""
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        short = length - processor.prompt_length_to_skip < processor.min_new_tokens
    elif type(processor) is MinLengthLogitsProcessor:
        short = length < processor.min_length
    else:
        return False
    if short:
        ends = processor.eos_token_id
        scores.index_fill_(1, ends[(ends >= 0) & (ends < scores.shape[1])], float("-inf"))
    return True
