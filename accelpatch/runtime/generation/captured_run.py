"""One call of generate() over captured steps: its prompt, its steps, and the cache that it gives back."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.rotary import of_one_axis
from accelpatch.models.multimodal import first_position
from accelpatch.runtime.cache_contents import OWN_CACHE, Contents
from accelpatch.runtime.cache_form import misfit, why_not
from accelpatch.runtime.generation.decoding import stock_loop_because
from accelpatch.runtime.generation.speculation import NONE, Lookup
from accelpatch.runtime.graphs import prefill
from accelpatch.runtime.graphs.capture import Graph
from accelpatch.runtime.graphs.kv_cache import cache_of
from accelpatch.runtime.graphs.multimodal_parts import FORWARD as PARTS
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.sampler import Sampler
from accelpatch.runtime.graphs.step import CAPTURED, CapturedStep


class Drafting(Protocol):
    """What became of the draft tokens of a call. accepted: how many were."""

    accepted: int

    def report(self, paths: Counter[str]) -> None:
        """Count them."""


class CapturedRun:
    """One call of generate() over a captured step. At its end a cache that the caller can see gets the tokens back."""

    result: Any = GenerateDecoderOnlyOutput
    mask = "attention_mask"  # of the tokens that are continued, among a call's arguments

    @classmethod
    def why_not(cls, model: Any, runtime: CapturedRuntime, config: Any, synced: bool, kwargs: Any) -> str | None:
        """Why transformers' own loop must run; None where a run can."""
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if (mask is not None and mask.dim() != 2) or (positions is not None and positions.dim() not in (2, 3)):
            return "an attention mask or positions of another shape than [B, L]"
        if positions is not None and of_one_axis(positions[..., -1:]) is None:
            return "a last token whose positions differ between time, height and width"
        if kwargs.get(CACHE) is None:
            return "no cache"
        cache = kwargs[CACHE]
        reason = stock_loop_because(model, config, synced, kwargs) or why_not(cache) or runtime.why_not(model)
        return reason or misfit(cache, runtime.captured.cached)

    @classmethod
    def begun(cls, model: Any, runtime: CapturedRuntime, ids: Tensor, most: int | None, kwargs: Any) -> CapturedRun:
        """A run for ids[B, L], to become at most `most` tokens. Raises NotCaptured."""
        mask = kwargs.get(cls.mask)  # covers the tokens in a cache that was passed in too
        length = ids.shape[1] if mask is None else max(ids.shape[1], int(mask.shape[1]))
        return cls(model, runtime, cls.step_for(model, runtime, ids, runtime.room(length, most), kwargs))

    @classmethod
    def step_for(cls, model: Any, runtime: CapturedRuntime, ids: Tensor, capacity: int, kwargs: Any) -> CapturedStep:
        """The step of a call."""
        return runtime.step(model, ids.shape[0], capacity)

    def __init__(self, model: Any, runtime: CapturedRuntime, step: CapturedStep):
        self.runtime, self.step = runtime, step
        step.vacate()
        self.kwargs: dict[str, Any] = {}
        self._model = model
        self.lookup: Lookup | None = None
        self.drafting: Drafting | None = None  # the lookup, or what a model drafts
        self.slot = 0  # tokens cached, including a step that was too many
        self._contents: Contents | None = None  # of the call's cache, in that of the step
        self._seen = True  # whether the caller can see the cache after the call
        self._first = 0
        self.states: Any = None  # the hidden states of the prompt, where they were asked for

    def __enter__(self) -> CapturedRun:
        return self

    def __exit__(self, *error: Any) -> None:
        paths, drafting, steps = self.runtime.paths, self.drafting, 0
        if self._contents is not None:
            steps = self._contents.length - self._first
            if not self._seen:
                self._contents.length = 0  # nothing to copy
            self._contents.detach()
        if drafting is not None and steps:
            # after an exception, accepted draft tokens may not have been emitted
            steps = max(steps - drafting.accepted, 0)
            drafting.report(paths)
        paths[CAPTURED] += steps
        paths[self.runtime.captured.way(self.step)] += steps

    @property
    def model(self) -> Any:
        """The model whose call it is."""
        return self._model

    def looking_up(self, ids: Tensor, end: int | None) -> Lookup | None:
        """This run with draft tokens, where the recipe asks for them and they are possible; else None."""
        drafts = self.runtime.captured.drafts(self.step)
        if isinstance(drafts, str):
            self.runtime.paths[NONE + drafts] += 1
        elif drafts is not None:
            self.lookup = self.drafting = Lookup(self, drafts, ids, end)
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
            before = self._by_fused_layers()
            with self.runtime.prompting():
                outputs = self._model._prefill(ids, config, kwargs, is_first_iteration=True)
            self.states = getattr(outputs, "hidden_states", None)
            cache = cache_of(outputs)  # Phi-3 makes a new cache where its rotary frequencies change
            logits, length = outputs.logits[:, -1].to(copy=True, dtype=torch.float32), cache.get_seq_length()
            if self.step.fused and self._by_fused_layers() == before:
                self.runtime.paths[f"prefill by modules: {reason}"] += 1
        self.kwargs = self._model._update_model_kwargs_for_generation(outputs, kwargs)
        positions = self.kwargs.get("position_ids")
        self._continue(cache, length, kwargs.get(self.mask), positions, config)
        return logits.to(ids.device)

    def _by_fused_layers(self) -> int:
        """How often the fused layers of a multimodal model's language model ran so far."""
        return sum(count for path, count in self.runtime.paths.items() if path.startswith(PARTS))

    def _continue(self, cache: Any, length: int, mask: Tensor | None, positions: Tensor | None, config: Any) -> None:
        """Go on by steps behind the `length` tokens in `cache`. mask: of these. positions: up to the next one."""
        mask = None if mask is None else mask[:, :length]
        while self.step.capacity < length:
            self.step = self.runtime.larger(self._model, self.step)
        self._contents = self.step.attach(cache)
        self._seen = bool(config.return_dict_in_generate) or not getattr(cache, OWN_CACHE, False)
        self._first = self.slot = self._contents.length = length
        self.step.show(length, mask)
        if positions is not None:
            given = of_one_axis(positions[..., -1:])
            assert given is not None
        else:
            given = torch.tensor(length) if mask is None else mask.ne(0).sum(1, keepdim=True)
        self.step.batch.begin(length, given + first_position(self._model))

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
