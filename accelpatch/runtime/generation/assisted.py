"""generate() with drafts (`assistant_model=`, `assistant_early_exit=`, `prompt_lookup_num_tokens=`) over captured or
native steps.

What they cannot do runs transformers' own loop over the patched modules, and the report says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.triton.launch import on_device
from accelpatch.report import NO_DRAFTS
from accelpatch.runtime.code_watch import CodeWatch
from accelpatch.runtime.cpu.native_step import NativeRuntime
from accelpatch.runtime.generation.candidate_drafts import (
    CandidateLookup,
    candidate_generator,
    kind,
    settings_of,
    source_of,
)
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.decoding import loop
from accelpatch.runtime.generation.draft_model_run import AssistantRun, DraftRun, ExitRun, why_not_assistant
from accelpatch.runtime.generation.drafted_loop import Checked, DeviceLoop, Drafted
from accelpatch.runtime.generation.drafter import Limit, Pace, threshold_of
from accelpatch.runtime.generation.hosted_drafts import ModelLookup
from accelpatch.runtime.generation.native_drafts import native_assisted, native_why_not
from accelpatch.runtime.generation.state_drafts import StatesLookup, from_states, states_why_not
from accelpatch.runtime.graphs.drafts import DRAFTS, TOKENS, several_tokens_why_not
from accelpatch.runtime.graphs.kv_cache import NotCaptured
from accelpatch.runtime.graphs.model_drafts import ModelDrafts
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.sampler import Sampler, Unknown
from accelpatch.runtime.graphs.step import CapturedStep

Stock = Callable[..., Any]
RUNTIME = "_accelpatch_runtime"  # as in patched_model.py
ROOM = 8192  # new tokens of a call up to which a model drafts: its cache has room for all of them from the start
ASSISTANTS = 2  # unpatched ones whose captured steps, and with them weights, a target keeps
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
        if runtime is not None:
            return assisted(self, runtime, stock, given, synced_gpus, streamer, assistant_model, extra, kwargs)
        return stock(*given, synced_gpus, streamer, assistant_model=assistant_model, **extra, **kwargs)

    return decoding


def kind_why_not(model: Any, config: Any, assistant: Any, extra: dict[str, Any]) -> str | None:
    """Why drafts of this kind are transformers' own affair; None where captured steps may make them."""
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        return "assistant_ensemble_weight"
    if (layers := config.assistant_early_exit) is not None:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        return None if 0 < layers <= count else f"an exit after {layers} of {count} layers"
    candidates = from_states(config, assistant) or kind(config, assistant, extra)
    if assistant is None and candidates is None:
        return "no assistant"
    if model.config.is_encoder_decoder or (assistant is not None and assistant.config.is_encoder_decoder):
        return "an encoder-decoder"
    if candidates == "another tokenizer" and config.do_sample:
        return "another tokenizer, whose sampled tokens are another's"
    if type(assistant).__name__.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant")):
        return type(assistant).__name__
    return None


def assisted(
    model: Any, runtime: CapturedRuntime | NativeRuntime, stock: Stock, given: tuple[Any, ...], synced_gpus: bool,
    streamer: Any, assistant: Any, extra: dict[str, Any], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Replaces the model's `_assisted_decoding`. given: as of captured_loop. extra: its arguments besides the
    loop's."""
    ids, *_, config = given
    reason = kind_why_not(model, config, assistant, extra) or ("several rows" if len(ids) > 1 else None)
    if reason is None and isinstance(runtime, NativeRuntime):
        candidates = kind(config, assistant, extra) is not None
        reason = from_states(config, assistant) or native_why_not(
            model, runtime, given, synced_gpus, None if candidates else assistant, kwargs
        )
        if reason is None:
            generator = candidate_generator(model, given, assistant, extra, kwargs) if candidates else None
            return native_assisted(model, runtime, given, streamer, assistant, kwargs, generator)
    elif reason is None and isinstance(runtime, CapturedRuntime):
        with on_device(ids), ExitStack() as locks, torch.no_grad():
            call = _Call(model, runtime, assistant, given, streamer, extra, kwargs)
            reason = call.why_not(synced_gpus, locks)
            if reason is None:
                return call.run()
    runtime.paths[f"{NO_DRAFTS}{reason}"] += 1
    return stock(*given, synced_gpus, streamer, assistant_model=assistant, **extra, **kwargs)


class _Call:
    """One call that a model drafts for."""

    def __init__(
        self, model: Any, runtime: CapturedRuntime, assistant: Any, given: tuple[Any, ...], streamer: Any,
        extra: dict[str, Any], kwargs: Any,
    ):  # fmt: skip
        self._model, self._runtime, self._assistant = model, runtime, assistant
        self._ids, self._processors, self._criteria, self._config = given
        self._streamer, self._kwargs = streamer, kwargs
        self._by_host = ""  # why the host chooses each token
        self._exit: int | None = self._config.assistant_early_exit
        self._states = from_states(self._config, assistant)
        self._candidates = self._states or kind(self._config, assistant, extra)
        self._extra = extra
        self._generator: Any = None  # transformers', of candidates
        self._source = model if self._exit is not None else assistant
        if self._candidates is not None:
            self._by_host, self._settings = f"drafts of {self._candidates}", settings_of(self._config, assistant)
            self._source = source_of(model, self._candidates, assistant)
        else:
            self._settings = self._source.generation_config

    def why_not(self, synced: bool, locks: ExitStack) -> str | None:
        """Why transformers' own loop must run, or None; then both models are locked until `locks` ends."""
        runtime = self._runtime
        if not locks.enter_context(runtime.alone()):
            return "generate() within generate()"
        reason = CapturedRun.why_not(self._model, runtime, self._config, synced, self._kwargs)
        if reason is not None:
            return reason
        self._choose()
        try:
            self._run = CapturedRun(self._model, runtime, self._step())
            step = self._run.step
            reason = several_tokens_why_not(step, runtime.captured.fused)
            if self._states is not None and (step.fused is None or reason is None):
                reason = states_why_not(self._config, self._kwargs, runtime.captured.form, step.fused is not None)
            if reason is not None:
                return reason
            with torch.inference_mode(False):
                return self._prepare(drafts_of(step.batch), locks)
        except NotCaptured as error:
            return str(error)

    def _step(self) -> CapturedStep:
        """The target's step; for an early exit, which goes on over its cache, with room for all tokens."""
        length, most = self._ids.shape[1], self._criteria.max_length
        mask = self._kwargs.get(CapturedRun.mask)
        length = length if mask is None else max(length, int(mask.shape[1]))
        room = self._runtime.room(length, most)
        if self._exit is not None:
            room = max(room, self._runtime.room(min(most, length + ROOM) + 2 * TOKENS, None))
        return self._runtime.step(self._model, 1, room)

    def _prepare(self, drafts: ModelDrafts, locks: ExitStack) -> str | None:
        """Make what drafts; returns why it cannot be."""
        self._drafts, threshold = drafts, threshold_of(self._settings)
        if self._candidates is not None:
            given = (self._ids, self._processors, self._criteria, self._config)
            self._generator = candidate_generator(self._model, given, self._assistant, self._extra, self._kwargs)
            if self._states is not None:
                self._generator.do_sample = False  # random numbers are those of a call without drafts
            return None
        if self._exit is not None:
            self._drafter: DraftRun = ExitRun(self._run, self._exit, drafts, self._sampler, threshold)
            return None
        own, most = self._runtime_of(self._assistant), self._criteria.max_length
        room = min(most, self._ids.shape[1] + ROOM) + 2 * TOKENS
        if not own.lock.acquire(blocking=False):
            return "the assistant is within another call"
        locks.callback(own.lock.release)
        locks.enter_context(own.code)
        if not locks.enter_context(own.alone()):
            return "the assistant is within another call"
        if reason := why_not_assistant(self._assistant, own, drafts.batch, room):
            return reason
        self._drafter = AssistantRun(self._assistant, own, drafts, self._sampler, threshold, room)
        same = self._drafter.step.batch.logits.shape == drafts.batch.logits.shape
        return None if same else "an assistant of another vocabulary"

    def _choose(self) -> None:
        """The sampler of the call; where the host chooses the tokens, of the drafts alone."""
        config = self._config
        try:
            if config.return_dict_in_generate and (config.output_scores or config.output_logits):
                raise Unknown("scores or logits were asked for")
            self._sampler = Sampler(self._processors, self._criteria, config.do_sample, self._ids.shape[1])
        except Unknown as reason:
            self._by_host = self._by_host or str(reason)
            self._sampler = Sampler([], [], False, 0)

    def _runtime_of(self, assistant: Any) -> CapturedRuntime:
        """The captured steps of an assistant: its own, or made here for one that is not patched."""
        own = vars(assistant).get(RUNTIME)
        if isinstance(own, CapturedRuntime):
            return own
        found = self._runtime.assistants.get(assistant)
        if found is None:
            found = CapturedRuntime()
            found.code = CodeWatch(assistant)
            known = self._runtime.assistants
            known[assistant] = found
            while len(known) > ASSISTANTS:
                del known[next(iter(known))]
        return found

    def run(self) -> Any:
        """The result of generate()."""
        limit = Limit(self._settings, DRAFTS)
        pace = self._runtime.paces.setdefault(self._source, Pace())
        try:
            if self._generator is not None:
                return self._hosted(Checked(self._run, self._drafts, pace, limit))
            given = (self._run, self._drafts, self._drafter, pace, limit)
            return self._hosted(Drafted(*given)) if self._by_host else self._late(DeviceLoop(*given))
        finally:
            if self._generator is None:
                self._drafter.close()
            limit.keep()

    def _hosted(self, checked: Checked) -> Any:
        run, most = self._run, self._criteria.max_length
        if self._generator is None:
            steps = run.drafting = ModelLookup(checked, self._ids, most)
        else:
            looking_up = CandidateLookup if self._states is None else StatesLookup
            steps = run.drafting = looking_up(checked, self._generator, self._ids, most)
        self._runtime.paths[f"token chosen by the host: {self._by_host}"] += 1
        given = (self._ids, self._processors, self._criteria, self._config, self._streamer, self._kwargs)
        with run:
            return loop(steps, *given, run.result)

    def _late(self, drafted: DeviceLoop) -> Any:
        run, config = self._run, self._config
        run.drafting = drafted.counts
        with run:
            logits = drafted.prompt(self._ids, config, self._kwargs)
            pad = config._pad_token_tensor if self._sampler.ends is not None else None
            graph = run.sampler(self._sampler, pad)
            run.step.batch.logits.copy_(logits)
            most = self._criteria.max_length - self._ids.shape[1]
            made = drafted.loop(self._sampler, graph, self._streamer, most)
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
