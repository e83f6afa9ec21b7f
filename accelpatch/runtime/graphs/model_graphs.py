"""What was captured of a model: in one state of its adapters (steps by their size, short prompts, single calls), and in
the last states that it was in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from accelpatch import own_code
from accelpatch.errors import KernelError
from accelpatch.fusion.cached import Cached
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_model import FUSED, FusedModel
from accelpatch.fusion.read_layers import fused_model
from accelpatch.fusion.spread import computes_on, device_of, several_devices
from accelpatch.kernels.layouts.kv_states import FLOAT
from accelpatch.runtime.graphs.calls import CapturedCalls
from accelpatch.runtime.graphs.capture import GraphOf
from accelpatch.runtime.graphs.drafts import Drafts, several_tokens_why_not, verifying
from accelpatch.runtime.graphs.embedded_prompts import EmbeddedPrompts
from accelpatch.runtime.graphs.encoder_decoder import Encoded, EncoderDecoderStep, Learned, Source
from accelpatch.runtime.graphs.encoder_decoder_learning import learned_with_encoder
from accelpatch.runtime.graphs.fused_forward import prompts_of
from accelpatch.runtime.graphs.graph_memory import GraphMemory
from accelpatch.runtime.graphs.kv_cache import NotCaptured, learned, shapes_of
from accelpatch.runtime.graphs.prefill import Prompts
from accelpatch.runtime.graphs.step import CAPTURE_ERRORS, Batch, CapturedStep, first_line

ENCODER = "an encoder-decoder"
MODULES = "modules in the captured step: "  # and the reason
STEPS = 4  # graphs, each with its cache, that are kept per model
STATES = 4  # adapter states, besides the present one, whose graphs are kept
ROOMY = 4  # times the capacity that is needed: a fused step whose cache has no more serves as well

Key = tuple[int, int, tuple[int, ...], Source | None]  # rows, capacity, watched, of an encoder-decoder


class CapturedModel:
    """The graphs of one model, made when first needed. speculate: whether steps of one row take draft tokens. form: of
    the KV cache (kernels/layouts/kv_states.py); that of an encoder-decoder is FLOAT always.

    fused: its fused layers. why_not: why none of its steps can be captured, or None. why_not_fused: why it has no fused
    layers, or "".
    """

    def __init__(self, memory: GraphMemory, speculate: bool, form: str = FLOAT):
        self._memory, self._speculate, self.form = memory, speculate, form
        self.fused: FusedModel | None = None
        self.why_not: str | None = None
        self.why_not_fused = ""
        self.uncaptured: set[tuple[int, tuple[int, ...]]] = set()  # (rows, watched) of single calls without a step
        self._steps: OrderedDict[Key, CapturedStep] = OrderedDict()
        self._batches: dict[int, Batch] = {}
        self._shapes: tuple[Cached, ...] | None = None
        self.decoder: Learned | None = None  # of an encoder-decoder
        self._encoded: dict[tuple[int, Source], Encoded] = {}
        self._vocabulary = 0
        self._prompts: Prompts | None = None
        self._embedded: EmbeddedPrompts | None = None
        self._calls: dict[int, CapturedCalls] = {}  # by the id of the model or part

    @property
    def learned(self) -> bool:
        """Whether it is known what the layers cache, or that nothing can be captured."""
        return self.why_not is not None or self._shapes is not None

    def learn(self, model: nn.Module, given: Mapping[str, Any] | None = None) -> None:
        """Find out what the layers cache, by running one token. given: a call's arguments, of an encoder-decoder."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                if given is None:
                    self._vocabulary, self._shapes = learned(model)
                else:
                    self.decoder = found = learned_with_encoder(model, given)
                    self._vocabulary, self._shapes, self.why_not_fused = found.vocabulary, found.own, ENCODER
        except torch.OutOfMemoryError:
            raise
        except NotCaptured as error:
            self.why_not = str(error)
        except CAPTURE_ERRORS as error:
            self.why_not = f"its cache cannot be known ({type(error).__name__}: {first_line(error)})"

    def know(self, vocabulary: int, cache: Any) -> None:
        """Take what the layers cache from a cache that is filled, so that no module, and no hook, need run for it.

        Only where it is known to be one of the model's: `misfit` has no objection, and has looked at each layer.
        """
        if not self.learned and all(layer.heads for layer in self.cached):
            self._vocabulary, self._shapes = vocabulary, shapes_of(cache)

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What each layer caches."""
        return (self._shapes or ()) if self.fused is None else self.fused.cached

    @property
    def read(self) -> bool:
        """Whether the fused layers were read, or there are none."""
        return self.fused is not None or bool(self.why_not_fused)

    def fuse(self, model: nn.Module, unfused: Mapping[int, str]) -> None:
        """Read the model's fused layers, or why there are none; weights that get concatenated have moved after this.

        unfused: place -> why, of layers that must run as modules.
        """
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.fused = fused_model(model, unfused) if self.why_not is None else None
        except (CannotFuse, KernelError) as reason:
            self.why_not_fused = str(reason)

    def graph(self, device: torch.device) -> GraphOf:
        """The function that captures programs for this model."""
        return self._memory.graph(device)

    def step(
        self, model: nn.Module, rows: int, capacity: int, watched: tuple[int, ...] = (), source: Source | None = None
    ) -> CapturedStep:
        """A step for this size or a larger one, captured if needed. Raises NotCaptured; then no other size is tried.

        watched: places of layers with hooks. source: of an encoder-decoder.
        """
        alike = self._alike(rows, watched, source)
        # one with a larger cache serves too where it runs as one of this capacity would
        fits = (one for one in alike if capacity <= one[1] <= capacity * (ROOMY if self._by_length(one) else 1))
        key = next(fits, None)
        if key is None:
            key = (rows, capacity, watched, source)
            self._steps[key] = self._made(model, *key)
            for other in alike:
                if other[1] < capacity and self._by_length(other):
                    del self._steps[other]  # the new one serves in its place
            while len(self._steps) > STEPS:
                self._steps.popitem(last=False)
            self._drop_unused()
        self._steps.move_to_end(key)
        return self._steps[key]

    def _drop_unused(self) -> None:
        """Free what only steps used that are gone."""
        read = {(rows, source) for rows, *_, source in self._steps}
        self._batches = {n: batch for n, batch in self._batches.items() if n in dict(read)}
        self._encoded = {key: one for key, one in self._encoded.items() if key in read}

    def _alike(self, rows: int, watched: tuple[int, ...], source: Source | None) -> list[Key]:
        """Keys of the steps of so many rows, the smallest cache first."""
        found = (key for key in self._steps if (key[0], *key[2:]) == (rows, watched, source))
        return sorted(found, key=lambda key: key[1])

    def _by_length(self, key: Key) -> bool:
        """Whether the time and result of a step depend on the length alone: modules attend over all of a cache."""
        fused = self.fused if self._steps[key].fused else None
        return fused is not None and not (fused.unfused or fused.whole or key[2])

    def free(self, rows: int) -> None:
        """Free the graphs and their caches; the batch of `rows` stays, as a step may be using it."""
        self._prompts = self._embedded = None
        self._calls.clear()
        self._steps.clear()
        self._encoded.clear()
        self._batches = {n: batch for n, batch in self._batches.items() if n == rows}

    def prompts(self, fused: FusedModel) -> Prompts:
        """The captured short prompts of the model's fused layers, for single calls."""
        if self._prompts is None:
            self._prompts = prompts_of(fused, self.graph(computes_on(fused.embedding)))
        return self._prompts

    def embedded_prompts(self, fused: FusedModel) -> EmbeddedPrompts:
        """The captured short prompts of a multimodal model's fused layers, which are given as embeddings."""
        if self._embedded is None:
            self._embedded = EmbeddedPrompts(fused, self.graph(computes_on(fused.embedding)))
        return self._embedded

    def calls(self, model: nn.Module) -> CapturedCalls:
        """The captured calls of a model that does not generate, or of a part of a model."""
        made = self._calls.get(id(model)) or CapturedCalls(model, self.graph(next(model.parameters()).device))
        return self._calls.setdefault(id(model), made)

    def drafts(self, step: CapturedStep) -> Drafts | str | None:
        """The state for draft tokens, or why there are none; None where the recipe does not ask for them."""
        if not self._speculate:
            return None
        return several_tokens_why_not(step, self.fused) or step.no_drafts or step.batch.drafts

    def way(self, step: CapturedStep, watched: Collection[int] = ()) -> str:
        """How a step runs, for the report. watched: places of layers with hooks."""
        if step.fused:
            return FUSED if self.fused is None else FUSED + self.fused.exceptions_with(watched)
        if isinstance(step, EncoderDecoderStep) and step.ran:
            return FUSED + step.exceptions
        return MODULES + (self.why_not_fused or f"{step.batch.rows} rows")

    def _made(
        self, model: nn.Module, rows: int, capacity: int, watched: tuple[int, ...], source: Source | None
    ) -> CapturedStep:
        assert self._shapes is not None
        fused = self.fused
        device = device_of(model) if fused is None or fused.spread is None else fused.spread.last
        switched: Any = getattr(model, "_optimize_model_for_decode", nullcontext)  # experts, as transformers' own loop
        with torch.inference_mode(False), torch.no_grad(), switched():
            batch = self._batches.setdefault(rows, Batch(rows, self._vocabulary, device))
            if self.fused is not None and rows <= self.fused.most:
                try:
                    graph = self.graph(device)
                    step = CapturedStep(
                        model, batch, self._shapes, capacity, graph, self.fused, watched, self._memory.graph, self.form
                    )
                    whole = not self.fused.unfused and not watched and not self.fused.in_parts
                    drafting = self._speculate and rows == 1 and whole
                    return verifying(step, self.fused, self.graph(device)) if drafting else step
                except BaseException as error:
                    self.fused.forget()  # other steps go on with the same layers
                    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, CAPTURE_ERRORS):
                        raise
                    self.fused, self.why_not_fused = None, f"{type(error).__name__}: {first_line(error)}"
            if watched or several_devices(model):  # whose hooks a graph of the modules would not call
                raise NotCaptured(self.why_not_fused or f"{rows} rows")
            return self._by_modules(model, batch, capacity, source)

    def _by_modules(self, model: nn.Module, batch: Batch, capacity: int, source: Source | None) -> CapturedStep:
        """A step that runs the model's own forward."""
        if (reason := own_code.why_not_in(model.modules())) is not None:
            raise NotCaptured(reason)
        assert self._shapes is not None
        given = (model, batch, self._shapes, capacity, self.graph(batch.device))
        try:
            if source is None or self.decoder is None:
                return CapturedStep(*given, form=self.form)
            encoded = self._encoded.get((batch.rows, source)) or Encoded(batch.rows, source, self.decoder, batch.device)
            self._encoded[batch.rows, source] = encoded
            return EncoderDecoderStep(*given, encoded)
        except torch.OutOfMemoryError:
            raise
        except (*CAPTURE_ERRORS, NotCaptured) as error:
            said = str(error) if isinstance(error, NotCaptured) else f"{type(error).__name__}: {first_line(error)}"
            self.why_not = f"its step cannot be captured ({said})"
            raise NotCaptured(self.why_not) from error


class AdapterStates:
    """What was captured of a model in each state of its adapters: the names of the active ones, in their order, and the
    format of the KV cache.

    present: of the state that it is in. memory: of all graphs.
    """

    def __init__(self, speculate: bool, form: str = FLOAT):
        self.memory, self._speculate = GraphMemory(), speculate
        self.present = CapturedModel(self.memory, speculate, form)
        self._name: tuple[str, ...] = ()
        self._others: OrderedDict[tuple[str, ...], CapturedModel] = OrderedDict()

    def begin(self, name: tuple[str, ...], form: str) -> None:
        """Say which state the model is in, before anything is captured of it. form: of the KV cache."""
        self._name = name
        self.present.form = form

    def switch(self, name: tuple[str, ...], form: str) -> None:
        """Make another state the present one, with what was captured of the model when it was last in it."""
        if name == self._name:
            return
        self._others[self._name] = self.present
        known = name in self._others
        self.present = self._others.pop(name) if known else CapturedModel(self.memory, self._speculate, form)
        self._name = name
        while len(self._others) > STATES:
            self._others.popitem(last=False)

    def free_others(self) -> None:
        """Free what was captured in other states."""
        self._others.clear()

    def moved(self) -> None:
        """Free other states whose graphs read weights that lie at other addresses since some were concatenated."""
        if any(other.fused is None or other.fused.unfused for other in self._others.values()):
            self._others.clear()
