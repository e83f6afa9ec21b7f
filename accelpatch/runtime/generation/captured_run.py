"""One call of generate() over a captured step: its prompt, its steps, and the cache that the caller gets back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.cache_contents import OWN_CACHE, Contents
from accelpatch.runtime.generation.captured_lookup import ACCEPTED, NONE, STEPS, Lookup
from accelpatch.runtime.generation.sampler import Sampler
from accelpatch.runtime.graphs.captured_cache import cache_of
from accelpatch.runtime.graphs.captured_graph import Graph
from accelpatch.runtime.graphs.captured_runtime import CapturedRuntime
from accelpatch.runtime.graphs.captured_step import CAPTURED, CapturedStep
from accelpatch.runtime.graphs.fused_prompt import FUSED_PROMPT, fused_prompt
from accelpatch.runtime.graphs.fused_prompt import why_not as why_not_fused


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
        reason = why_not_fused(self.step, ids, kwargs)
        if reason is None:
            graph = self.runtime.captured.graph(self.step.batch.device)
            chunk = getattr(config, "prefill_chunk_size", None)
            logits, length = fused_prompt(self.step, ids, kwargs, graph, chunk), ids.shape[1]
            outputs: Any = CausalLMOutputWithPast(**{CACHE: cache})
            self.runtime.paths[FUSED_PROMPT] += 1
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
