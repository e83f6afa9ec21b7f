"""The runtime of a patched model on a GPU: what was captured of it, dropped or switched when the model changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from accelpatch.errors import PatchError
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.spread import device_of
from accelpatch.kernels.layouts.kv_states import FLOAT
from accelpatch.runtime.graphs.calls import CapturedCalls, captured_outputs, generates
from accelpatch.runtime.graphs.capture import GRAPHS
from accelpatch.runtime.graphs.encoder_decoder import EncoderDecoderStep, Source
from accelpatch.runtime.graphs.encoder_decoder_call import IDS, one_token
from accelpatch.runtime.graphs.fused_forward import fused_outputs
from accelpatch.runtime.graphs.kv_cache import capacity_for, grown
from accelpatch.runtime.graphs.model_graphs import AdapterStates, CapturedModel
from accelpatch.runtime.graphs.multimodal_parts import part_outputs
from accelpatch.runtime.graphs.step import CapturedStep
from accelpatch.runtime.graphs.training_layers import TrainingLayers
from accelpatch.runtime.model_runtime import ModelRuntime
from accelpatch.runtime.quantized_cache import format_of_cache
from accelpatch.runtime.watch import Watch


class CapturedRuntime(ModelRuntime):
    """The graphs of one model.

    graph: "auto" or "off". cache: "auto" or "stock". max_length: the most tokens of a sequence, or None. speculate:
    "off" or "prompt_lookup". kv_cache: the format of the KV cache, as a recipe names it.
    """

    _learning = False  # true while the modules run to find out what they cache
    _prompting = False  # true while they run the prompt of a call over captured steps

    def __init__(
        self, graph: str = "auto", cache: str = "auto", max_length: int | None = None, speculate: str = "off",
        kv_cache: str = "auto",
    ):  # fmt: skip
        super().__init__(graph, cache, max_length, speculate, kv_cache)
        self.kv_cache = kv_cache
        self._form = self._present_form = kv_cache if kv_cache != "auto" else FLOAT
        self.lock, self.training_layers = threading.RLock(), TrainingLayers()
        self.max_length = max_length
        self._speculate = speculate != "off"
        self._off = "the recipe says graph: off" if graph == "off" else "the recipe says cache: stock"
        self._off = self._off if graph == "off" or cache == "stock" else ""
        self._busy = False
        self.assistants: WeakKeyDictionary[nn.Module, CapturedRuntime] = WeakKeyDictionary()  # unpatched ones
        self.close()

    def close(self) -> None:
        """Free every graph and cache."""
        self._states = AdapterStates(self._speculate, self._form)
        self._watch: Watch | None = None
        self._version = self.code.version
        self._flags: list[Any] = []
        self._done: list[tuple[torch.device, torch.cuda.Event]] = []

    @property
    def captured(self) -> CapturedModel:
        """What was captured of the model as it is."""
        return self._states.present

    def outputs(self, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """Outputs of a model call by fused layers or a graph; None where the modules must run."""
        if self._learning:
            return None
        if IDS in given:  # of the decoder of an encoder-decoder
            return one_token(self, model, given)
        return (fused_outputs if generates(model) else captured_outputs)(self, model, given)

    def part_outputs(self, part: Any, given: Mapping[str, Any] | None) -> Any:
        """As of ModelRuntime: of an encoder-decoder's encoder, and of the parts of a multimodal model."""
        model = self.code.model
        if given is None or self._learning or model is None or (self._busy and not self._prompting):
            return None
        if model.config.is_encoder_decoder:
            return captured_outputs(self, part, given) if model.get_encoder() is part else None
        if not self.lock.acquire(blocking=False):  # another thread is within a call
            return None
        before = self._busy, self._prompting
        self._busy = self._prompting = False  # or a part would find this thread within a call
        try:
            return part_outputs(self, model, part, given)
        finally:
            self._busy, self._prompting = before
            self.lock.release()

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """Context manager within `alone`: the model's own forward runs a prompt, and its parts may take fast paths."""
        self._prompting = True
        try:
            yield
        finally:
            self._prompting = False

    def ready(self, model: nn.Module, given: Mapping[str, Any]) -> bool:
        """Whether a single call of an encoder-decoder can be a captured step, as far as the model is concerned."""
        if self.code.cache or not self._looked(model) or self.watch.watched() or self.watch.other_code:
            return False
        if not self.captured.learned:
            self._learn(model, given)
        return self.captured.why_not is None

    def takes_format(self, model: nn.Module) -> bool:
        """Whether a call's cache may come to lie in a format that the call asks for."""
        if getattr(model.config, "is_encoder_decoder", False):
            return False
        with self.alone() as alone:
            return alone and self.why_not(model) is None

    def use_format(self, cache: Any) -> None:
        """Steps are those of the format that a call's cache asks for, or the recipe's; the lock must be held."""
        self._present_form = format_of_cache(cache, self._form)

    def fused(self, model: nn.Module, *, graphs: bool = False) -> tuple[FusedModel | None, list[int]]:
        """The model's fused layers, if it has any, and the indices of layers with hooks, which must run as modules.

        graphs: whether the caller may be capturing a graph of the call, after the same call without one.
        """
        if graphs and device_of(model).type == "cuda" and torch.cuda.is_current_stream_capturing():
            known = self._watch is not None and self.captured.read
            if not known or self.watch.stale() or self.watch.objection() is not None:
                return None, []
        elif self.code.cache or not self._looked(model):
            return None, []
        if not self.captured.read:
            self._fuse(model)
        return self.captured.fused, sorted({*self.watch.watched(), *self.watch.uncaptured})

    def calls(self, model: nn.Module) -> CapturedCalls | None:
        """The captured calls of the model as it is, or of its encoder; None where its modules must run."""
        whole = self.code.model or model
        if not self._looked(whole) or self.watch.watched() or self.watch.several_devices:
            return None
        return self.captured.calls(model)

    def prepare(self, model: nn.Module) -> FusedModel | str:
        """Lay out the weights of the model's fused layers now; returns those, or why there are none."""
        if not generates(model):
            return "it does not generate"
        if reason := self.unable(model):
            return reason
        self._look(model)
        if not self.captured.read:
            self._fuse(model)
        return self.captured.fused or self.captured.why_not_fused

    def unfuse(self, failed: Mapping[int, str]) -> None:
        """Run the modules of these layers from now on: place -> why."""
        self.unfused = {**self.unfused, **failed}
        if failed and self.captured.fused is not None:
            self.captured.fused = self.captured.fused.without(failed)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Context manager: locks the model's steps; yields False where this thread holds them (in a streamer)."""
        with self.lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                for device, done in self._done:  # the last step, on another stream, may still be running
                    torch.cuda.current_stream(device).wait_event(done)
                yield True
            finally:
                self._busy = False
                if self._states.memory.pool is not None:
                    devices = [device for device in self._states.memory.devices if device.type == "cuda"]
                    self._done = [(one, torch.cuda.Event()) for one in devices]
                    for one, done in self._done:
                        done.record(torch.cuda.current_stream(one))

    def why_not(self, model: nn.Module, given: Mapping[str, Any] | None = None) -> str | None:
        """Why no captured step can run, or None; inspects the model but captures nothing yet.

        given: the arguments of a call of an encoder-decoder.
        """
        if reason := self.code.cache or self.unable(model):
            return reason
        self._look(model)
        captured = self.captured
        objection = self.watch.objection() or ("a hook inside" if self.watch.watched() else None)
        if objection is not None and "hook" in objection:
            objection = "a hook on an inner module"
        objection = objection or self.watch.other_code  # it may do what it likes with the cache that it is given
        if captured.why_not is None and objection is not None:
            return objection
        if not captured.learned:
            self._learn(model, given)
            if not captured.read:
                self._fuse(model)
        return captured.why_not

    def room(self, length: int, most: int | None) -> int:
        """The cache capacity to start with after `length` tokens. Raises PatchError beyond the recipe's max_length."""
        if self.max_length is not None and (most or length) > self.max_length:
            raise PatchError(
                f"a sequence of up to {most or length} tokens was asked for and the recipe's max_length is "
                f"{self.max_length}: ask for fewer new tokens, or raise runtime: max_length"
            )
        return capacity_for(length + 1, self.max_length)

    def step(
        self, model: nn.Module, rows: int, capacity: int, watched: tuple[int, ...] = (), source: Source | None = None
    ) -> CapturedStep:
        """The step for this size, captured if needed; see CapturedModel.step. What no graph may hold is watched too."""
        watched = watched or (() if self._watch is None else tuple(self._watch.uncaptured))
        step = None
        with suppress(torch.OutOfMemoryError):
            step = self.captured.step(model, rows, capacity, watched, source)
        if step is None:  # free the caches of other adapter states and sizes; the error holds none of them any more
            self._states.free_others()
            self.captured.free(rows)
            step = self.captured.step(model, rows, capacity, watched, source)
        self._flags = [] if self._watch is None else self._watch.flags()
        return step

    def larger(self, model: nn.Module, step: CapturedStep) -> CapturedStep:
        """The step over a cache of the next larger capacity, with the contents of this one's."""
        capacity, source = grown(step.capacity, self.max_length), None
        if isinstance(step, EncoderDecoderStep):
            source = step.encoded.source
        larger = self.step(model, step.batch.rows, capacity, source=source)
        larger.adopt(step)
        return larger

    @property
    def watch(self) -> Watch:
        """The Watch of the model. Nobody else holds it: it keeps the model's present weights alive."""
        assert self._watch is not None
        return self._watch

    def _looked(self, model: nn.Module) -> bool:
        """Check the model for changes; returns False where its modules must run a single call."""
        replica = vars(model).get("_is_replica", False)  # a replica of nn.DataParallel has other weights
        if replica or self._busy or self.unable(model) is not None:
            return False
        self._look(model)
        return self.watch.objection() is None

    def unable(self, model: nn.Module) -> str | None:
        """Why neither captured steps nor fused layers can run now; does not look at the model's modules."""
        if next(model.parameters(), None) is None:
            return "a model without parameters"
        device = device_of(model)
        if self._off or device.type not in GRAPHS:
            return self._off or f"the model lies on {device.type}"
        if torch.is_autocast_enabled(device.type):
            return "autocast"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return None

    def _look(self, model: nn.Module) -> None:
        """Drop what was captured of a model that has changed; if only its adapters changed, switch to their state."""
        outdated = self._version != self.code.version
        if self._watch is None or outdated or self._watch.stale() or self._flags != self._watch.flags():
            self.code.look_anew()
            self.close()
            self._watch = Watch(model)
            self._flags = self._watch.flags()
            self._states.begin((*self._watch.adapters(), self._present_form), self._present_form)
        else:
            self._states.switch((*self._watch.adapters(), self._present_form), self._present_form)

    def _fuse(self, model: nn.Module) -> None:
        self._watch = None  # the Watch would keep the old weights alive while the new ones are made; graphs too
        self.training_layers.close()
        self.captured.fuse(model, self.unfused)
        self._states.moved()
        self._watch = Watch(model)
        self._flags = self._watch.flags()

    def learned(self, model: nn.Module) -> bool:
        """Find out by running one token what the layers cache; returns False where a hook would see it, or it fails."""
        if not self.watch.watched():
            self._learn(model)
        return self.captured.learned and self.captured.why_not is None

    def _learn(self, model: nn.Module, given: Mapping[str, Any] | None = None) -> None:
        self._learning = True
        try:
            self.captured.learn(model, given)
        finally:
            self._learning = False
        self._flags = [] if self._watch is None else self._watch.flags()
