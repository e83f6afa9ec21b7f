"""generate() over captured steps: the loop, and one call with its prompt, its steps and the cache that it gives back.

Where the token can be sampled on the device, the host queues the next step before it reads the last token's report, and
drops the step that is too many at the end. Where logits processors or criteria need the host, the model's step is
replayed and the host samples. All else runs transformers' own loop over the same modules. The runtime's `paths` counts
each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.triton.launch import on_device
from accelpatch.runtime.cache_contents import OWN_CACHE, Contents
from accelpatch.runtime.cache_form import misfit, why_not
from accelpatch.runtime.generation.decoding import loop, stock_loop_because
from accelpatch.runtime.generation.speculation import ACCEPTED, NONE, STEPS, Late, Lookup
from accelpatch.runtime.graphs import prefill
from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.kv_cache import NotCaptured, cache_of
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.sampler import Reports, Sampler, Unknown
from accelpatch.runtime.graphs.step import CAPTURED, CapturedStep

Stock = Callable[..., Any]


class CapturedRun:
    """One call of generate() over a captured step. At its end a cache that the caller can see gets the tokens back."""

    def __init__(self, model: Any, runtime: CapturedRuntime, step: CapturedStep):
        self.runtime, self.step = runtime, step
        step.vacate()
        self.kwargs: dict[str, Any] = {}
        self._model = model
        self.lookup: Lookup | None = None
        self.slot = 0  # tokens cached, including a step that was too many
        self._contents: Contents | None = None  # of the call's cache, in that of the step
        self._seen = True  # whether the caller can see the cache after the call
        self._first = 0

    def __enter__(self) -> CapturedRun:
        return self

    def __exit__(self, *error: Any) -> None:
        paths, lookup, steps = self.runtime.paths, self.lookup, 0
        if self._contents is not None:
            steps = self._contents.length - self._first
            if not self._seen:
                self._contents.length = 0  # nothing to copy
            self._contents.detach()
        if lookup is not None and steps:
            # after an exception, accepted draft tokens may not have been emitted
            steps = max(steps - lookup.accepted, 0)
            paths[STEPS] += lookup.steps
            paths[ACCEPTED] += lookup.accepted
        paths[CAPTURED] += steps
        paths[self.runtime.captured.way(self.step)] += steps

    def looking_up(self, ids: Tensor, end: int | None) -> Lookup | None:
        """This run with draft tokens, where the recipe asks for them and they are possible; else None."""
        drafts = self.runtime.captured.drafts(self.step)
        if isinstance(drafts, str):
            self.runtime.paths[NONE + drafts] += 1
        elif drafts is not None:
            self.lookup = Lookup(self, drafts, ids, end)
        return self.lookup

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """Logits [B, V] float32 after the prompt. If the model's own forward cached it, the cache is moved."""
        cache = kwargs[CACHE]
        reason = prefill.why_not(self.step, ids, kwargs)
        if reason is None:
            graph = self.runtime.captured.graph(self.step.batch.device)
            chunk = getattr(config, "prefill_chunk_size", None)
            logits, length = prefill.prefill(self.step, ids, kwargs, graph, chunk), ids.shape[1]
            outputs: Any = CausalLMOutputWithPast(**{CACHE: cache})
            self.runtime.paths[prefill.FUSED_PROMPT] += 1
        else:
            outputs = self._model._prefill(ids, config, kwargs, is_first_iteration=True)
            cache = cache_of(outputs)  # Phi-3 makes a new cache where its rotary frequencies change
            logits, length = outputs.logits[:, -1].to(copy=True, dtype=torch.float32), cache.get_seq_length()
            if self.step.fused:
                self.runtime.paths[f"prefill by modules: {reason}"] += 1
        self.kwargs = self._model._update_model_kwargs_for_generation(outputs, kwargs)
        mask = kwargs.get("attention_mask")
        mask = None if mask is None else mask[:, :length]
        while self.step.capacity < length:
            self.step = self.runtime.larger(self._model, self.step)
        self._contents = self.step.attach(cache)
        self._seen = bool(config.return_dict_in_generate) or not getattr(cache, OWN_CACHE, False)
        self._first = self.slot = self._contents.length = length
        self.step.show(length, mask)
        given: Tensor | None = self.kwargs.get("position_ids")
        if given is None:
            given = torch.tensor(length) if mask is None else mask.ne(0).sum(1, keepdim=True)
        else:
            given = given[:, -1:]  # already the next token's position
        self.step.batch.begin(length, given)
        return logits.to(ids.device)

    def sampler(self, sampler: Sampler, pad: Tensor | None) -> Graph:
        """The captured program of a sampler, set up for this run."""
        batch = self.step.batch
        graph = batch.graph_of(sampler, self.runtime.captured.graph(batch.device))
        batch.begin_sampling(sampler, self.slot, pad)
        return graph

    def all_rows(self, sampler: Sampler) -> Graph | None:
        """The program that samples at all places of a step with draft tokens; None where those depend on each other."""
        if self.lookup is None or not sampler.alone:
            return None
        return self.lookup.drafts.graph_of(sampler, self.runtime.captured.graph(self.step.batch.device))

    def advance(self) -> None:
        """Queue one step of the model; a full cache is grown first."""
        if self.slot >= self.step.capacity:
            self.step = self.runtime.larger(self._model, self.step)
        self.step.replay()
        self.slot += 1

    def used(self, tokens: int) -> None:
        """Set how many tokens after the prompt belong into the caller's cache, leaving out steps that were too many."""
        while self._contents is not None and self._contents.length < self._first + tokens:
            self._contents.grow()

    def next(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, V] float32 after `tokens`[B], the last ones of `ids`."""
        self.step.batch.tokens.copy_(tokens)
        self.advance()
        self.used(self.slot - self._first)
        return self.step.batch.logits.to(ids.device, copy=True)


def captured_loop(
    model: Any, runtime: CapturedRuntime, stock: Stock, given: tuple[Any, ...], synced_gpus: bool, streamer: Any,
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Replaces the model's `_sample`. given: ids[B, L], logits processors, stopping criteria and generation config."""
    ids, processors, criteria, config = given
    # streams and events are those of the model's GPU, whichever is the current one
    with on_device(ids), runtime.alone() as alone:
        reason = (
            _stock_because(model, runtime, ids, config, synced_gpus, kwargs)
            if alone
            else "generate() within generate()"
        )
        reason = reason or _turning(model, ids.shape[1], criteria.max_length)
        if reason is None:
            mask = kwargs.get("attention_mask")  # covers the tokens in a cache that was passed in too
            length = ids.shape[1] if mask is None else max(ids.shape[1], int(mask.shape[1]))
            capacity = runtime.room(length, criteria.max_length)
            try:
                run = CapturedRun(model, runtime, runtime.step(model, ids.shape[0], capacity))
            except NotCaptured as error:
                reason = str(error)
        if reason is None:
            with torch.no_grad():
                return _decode(run, ids, processors, criteria, config, streamer, kwargs)
    runtime.paths[f"stock loop: {reason}"] += 1
    return stock(*given, synced_gpus, streamer, **kwargs)


def _stock_because(
    model: Any, runtime: CapturedRuntime, ids: Tensor, config: Any, synced_gpus: bool, kwargs: dict[str, Any]
) -> str | None:
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if (mask is not None and mask.dim() != 2) or (positions is not None and positions.dim() != 2):
        return "an attention mask or positions of another shape than [B, L]"
    if kwargs.get(CACHE) is None:
        return "no cache"
    cache = kwargs[CACHE]
    reason = stock_loop_because(model, config, synced_gpus, kwargs) or why_not(cache) or runtime.why_not(model)
    return reason or misfit(cache, runtime.captured.cached)


def _turning(model: Any, length: int, most: int) -> str | None:
    """Why longrope's frequencies change while a sequence grows from `length` to `most` tokens; None where they do not.

    They change beyond a fixed length, where transformers computes the whole cache anew.
    """
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    switch = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "longrope" or switch is None or not length <= switch < most - 1:
        return None
    return f"longrope's frequencies change beyond {switch} tokens"


def _decode(
    run: CapturedRun, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any, kwargs: dict[str, Any]
) -> Any:
    steps = run.looking_up(ids, criteria.max_length) or run
    try:
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            raise Unknown("scores or logits were asked for")
        sampler = Sampler(processors, criteria, config.do_sample, ids.shape[1])
    except Unknown as reason:
        run.runtime.paths[f"token chosen by the host: {reason}"] += 1
        with run:
            return loop(steps, ids, processors, criteria, config, streamer, kwargs)
    with run:
        logits = steps.prompt(ids, config, kwargs)
        made = _late(run, sampler, config, logits, streamer, criteria.max_length - ids.shape[1])
    sequences = torch.cat([ids, made.to(ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE: run.kwargs.get(CACHE)})


def _late(run: CapturedRun, sampler: Sampler, config: Any, logits: Tensor, streamer: Any, most: int) -> Tensor:
    """New tokens [B, N], N up to `most`, on the host. Each report is read while the model's next step runs."""
    batch = run.step.batch
    graph = run.sampler(sampler, config._pad_token_tensor if sampler.ends is not None else None)
    batch.logits.copy_(logits)
    if run.lookup is not None:
        return Late(run.lookup, graph, run.all_rows(sampler), streamer, most).run()
    reports = Reports(batch.report)
    made: list[Tensor] = []
    graph.replay()
    reports.send()
    going_on = True
    while going_on:
        ahead = len(made) + 1 < most
        if ahead:
            run.advance()
        report = reports.wait()
        going_on = ahead and bool(report[-1])
        if going_on:  # queued before the streamer, which may be slow, is called
            graph.replay()
            reports.send()
        made.append(report[:-1])
        run.used(len(made) - 1)  # in case the streamer raises
        if streamer is not None:
            streamer.put(report[:-1])
    if streamer is not None:
        streamer.end()
    return torch.stack(made, dim=1)
