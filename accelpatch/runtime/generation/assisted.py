"""generate() with the drafts of a model (`assistant_model=`, `assistant_early_exit=`) over captured steps.

What they cannot do runs transformers' own loop over the patched modules, and the report says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.triton.launch import on_device
from accelpatch.runtime.code_watch import CodeWatch
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.draft_model_run import AssistantRun, DraftRun, why_not_assistant
from accelpatch.runtime.generation.drafted_loop import DeviceLoop
from accelpatch.runtime.generation.drafter import NONE, Limit, Pace, threshold_of
from accelpatch.runtime.graphs.batch import DRAFTS, TOKENS
from accelpatch.runtime.graphs.drafts import several_tokens_why_not
from accelpatch.runtime.graphs.kv_cache import NotCaptured
from accelpatch.runtime.graphs.model_drafts import ModelDrafts
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.sampler import Sampler, Unknown

Stock = Callable[..., Any]
RUNTIME = "_accelpatch_runtime"  # as in patched_model.py
NAME = "_assisted_decoding"  # transformers' method


def assisting(cls: Any, name: str) -> Any:
    """Wraps generate()'s loop with drafts: accelpatch's over fast steps where possible, else transformers' own."""
    plain = getattr(cls, name)

    @functools.wraps(plain)
    def decoding(
        self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, inputs_tensor: Any = None, assistant_model: Any = None,
        assistant_tokenizer: Any = None, tokenizer: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        runtime, stock = vars(self).get(RUNTIME), functools.partial(getattr(cls, name), self)
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        extra = {"inputs_tensor": inputs_tensor, "assistant_tokenizer": assistant_tokenizer, "tokenizer": tokenizer}
        if runtime is not None and runtime.begin is not None:
            runtime.begin(input_ids, generation_config)
        if isinstance(runtime, CapturedRuntime) and generation_config.prompt_lookup_num_tokens is None:
            return assisted(self, runtime, stock, given, synced_gpus, streamer, assistant_model, extra, kwargs)
        return stock(*given, synced_gpus, streamer, assistant_model=assistant_model, **extra, **kwargs)

    return decoding


def kind_why_not(model: Any, config: Any, assistant: Any, extra: dict[str, Any]) -> str | None:
    """Why drafts of this kind are transformers' own affair; None where captured steps may make them."""
    if getattr(config, "use_mtp", False):
        return "MTP heads"
    if getattr(config, "speculation_type", None) == "dflash":
        return "DFlash"
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        return "assistant_ensemble_weight"
    if assistant is None:
        return "assistant_early_exit" if config.assistant_early_exit is not None else "no assistant"
    if extra.get("tokenizer") is not None and extra.get("assistant_tokenizer") is not None:
        return "another tokenizer"
    if model.config.is_encoder_decoder or assistant.config.is_encoder_decoder:
        return "an encoder-decoder"
    if type(assistant).__name__.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant")):
        return type(assistant).__name__
    return None


def assisted(
    model: Any, runtime: CapturedRuntime, stock: Stock, given: tuple[Any, ...], synced_gpus: bool, streamer: Any,
    assistant: Any, extra: dict[str, Any], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Replaces the model's `_assisted_decoding`. given: as of captured_loop. extra: its arguments beside the loop's."""
    ids, processors, criteria, config = given
    reason = kind_why_not(model, config, assistant, extra) or ("several rows" if len(ids) > 1 else None)
    if reason is None:
        with on_device(ids), ExitStack() as held, torch.no_grad():
            call = _Call(model, runtime, assistant, given, streamer, kwargs)
            reason = call.why_not(synced_gpus, held)
            if reason is None:
                return call.run()
    runtime.paths[NONE + reason] += 1
    return stock(*given, synced_gpus, streamer, assistant_model=assistant, **extra, **kwargs)


class _Call:
    """One call that a model drafts for."""

    def __init__(
        self, model: Any, runtime: CapturedRuntime, assistant: Any, given: tuple[Any, ...], streamer: Any, kwargs: Any
    ):
        self._model, self._runtime, self._assistant = model, runtime, assistant
        self._ids, self._processors, self._criteria, self._config = given
        self._streamer, self._kwargs = streamer, kwargs
        self._sampler: Sampler | None = None
        self._by_host = ""

    def why_not(self, synced: bool, held: ExitStack) -> str | None:
        """Why transformers' own loop must run, or None; then both models are locked until `held` ends."""
        runtime, most = self._runtime, self._criteria.max_length
        if not held.enter_context(runtime.alone()):
            return "generate() within generate()"
        reason = CapturedRun.why_not(self._model, runtime, self._config, synced, self._kwargs)
        if reason is not None:
            return reason
        try:
            self._sampler = Sampler(self._processors, self._criteria, self._config.do_sample, self._ids.shape[1])
        except Unknown as name:
            return f"token chosen by the host: {name}"
        try:
            self._run = CapturedRun.begun(self._model, runtime, self._ids, most, self._kwargs)
            step = self._run.step
            if reason := several_tokens_why_not(step, runtime.captured.fused):
                return reason
            own = self._runtime_of(self._assistant)
            if not own.lock.acquire(blocking=False):
                return "the assistant is within another call"
            held.callback(own.lock.release)
            held.enter_context(own.code)
            if not held.enter_context(own.alone()):
                return "the assistant is within another call"
            room = most + 2 * TOKENS
            if reason := why_not_assistant(self._assistant, own, step.batch, room):
                return reason
            with torch.inference_mode(False):
                self._drafts = drafts_of(step.batch)
                threshold = threshold_of(self._assistant.generation_config)
                given = (self._assistant, own, self._drafts, self._sampler, threshold, room)
                self._drafter: DraftRun = AssistantRun(*given)
            if self._drafter.step.batch.logits.shape != step.batch.logits.shape:
                return "an assistant of another vocabulary"
        except NotCaptured as error:
            return str(error)
        return None

    def _runtime_of(self, assistant: Any) -> CapturedRuntime:
        """The captured steps of an assistant: its own, or made here for one that is not patched."""
        own = vars(assistant).get(RUNTIME)
        if isinstance(own, CapturedRuntime):
            return own
        found = self._runtime.assistants.get(assistant)
        if found is None:
            found = CapturedRuntime()
            found.code = CodeWatch(assistant)
            self._runtime.assistants[assistant] = found
        return found

    def run(self) -> Any:
        """The result of generate()."""
        run, config, criteria, sampler = self._run, self._config, self._criteria, self._sampler
        assert sampler is not None
        limit = Limit(self._assistant.generation_config, DRAFTS)
        pace = self._runtime.paces.setdefault(self._assistant, Pace())
        graph = run.sampler(sampler, config._pad_token_tensor if sampler.ends is not None else None)
        most = criteria.max_length - self._ids.shape[1]
        loop = DeviceLoop(run, self._drafts, self._drafter, pace, limit, sampler, graph, self._streamer, most)
        run.drafting = loop.counts
        try:
            with run:
                logits = loop.prompt(self._ids, config, self._kwargs)
                run.sampler(sampler, config._pad_token_tensor if sampler.ends is not None else None)
                run.step.batch.logits.copy_(logits)
                made = loop.loop()
        finally:
            self._drafter.close()
            limit.keep()
        sequences = torch.cat([self._ids, made.to(self._ids.device)], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return run.result(sequences=sequences, **{CACHE: run.kwargs.get(CACHE)})


def drafts_of(batch: Any) -> ModelDrafts:
    """The state of the draft tokens of a batch of one row."""
    if batch.model_drafts is None:
        batch.model_drafts = ModelDrafts(batch)
    found: ModelDrafts = batch.model_drafts
    return found
