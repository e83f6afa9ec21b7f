"""Single-token steps of a patched model on a CPU as one native call, behind the model's own forward.

A call `model(...)` for one more token over a filled cache runs the native step; all other calls, and steps observed by
hooks, run the modules. `paths` counts both. Behind greedy decoding and sampling only the first step is such a call: the
later ones are a NativeRun's (generation/decoding.py).
"""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from accelpatch.errors import KernelError
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.native_encoder_decoder import native_encoder_decoder
from accelpatch.fusion.native_model import NativeModel, native_model
from accelpatch.fusion.rotary import of_one_axis
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import MAX_BATCH
from accelpatch.kernels.layouts.kv_states import FLOAT
from accelpatch.models.multimodal import configs_of_call, first_position, outputs_of, unused_by_steps
from accelpatch.runtime.cache_contents import Contents, attached
from accelpatch.runtime.cpu import encoder_decoder
from accelpatch.runtime.cpu.mixed_step import Places, mixed_step
from accelpatch.runtime.cpu.native_cache import Store, native_contents
from accelpatch.runtime.cpu.torch_threads import all_threads
from accelpatch.runtime.model_runtime import ModelRuntime
from accelpatch.runtime.quantized_cache import format_of_cache
from accelpatch.runtime.watch import Watch

NATIVE = "native step"
# Arguments of a step whose value does not change what it computes, or that step() reads. The tokenizer is that of stop
# strings: generate() hands it on, and a criterion has it already.
UNDERSTOOD = frozenset(
    {
        "input_ids", CACHE, "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep",
        "tokenizer",
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reading:
    """A model's weights for native steps, or why it has none; and the Watch that detects its changes.

    version: of the CodeWatch when they were read.
    """

    model: NativeModel | None
    unfit: str | None
    watch: Watch
    version: int


class NativeRuntime(ModelRuntime):
    """The native steps of one patched model. kv_cache: the format of the KV cache, as a recipe names it."""

    def __init__(self, kv_cache: str = "auto") -> None:
        super().__init__(kv_cache)
        self.kv_cache = kv_cache
        self.form = kv_cache if kv_cache != "auto" else FLOAT
        self._reading: Reading | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[NativeRuntime], tuple[Any, ...]]:
        return NativeRuntime, self._settings

    def outputs(self, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """Outputs of a model call for one more token by a native step; None where the modules must run."""
        logits = self.logits(model, given)
        if logits is not None and encoder_decoder.encodes(model):
            return encoder_decoder.outputs(logits, given)
        return None if logits is None else outputs_of(model, logits=logits, **{CACHE: given[CACHE]})

    def logits(self, model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
        """Logits [B, 1, V] of one more token, which is added to the cache; None where the modules must run."""
        given, understood = arguments, UNDERSTOOD
        if encoder_decoder.encodes(model):
            arguments, understood = encoder_decoder.as_of_decoder(given), encoder_decoder.UNDERSTOOD
        ids, cache = arguments.get("input_ids"), arguments.get(CACHE)
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or _is_empty(cache):
            self.paths["modules: a prompt, or no cache"] += 1
            return None
        reading = self.reading(model)
        reason = (
            _why_not(model, ids, given, understood) or reading.unfit or self.code.cache or reading.watch.objection()
        )
        if reason is not None:
            self.paths[f"modules: {reason}"] += 1
            return None
        assert reading.model is not None
        form = format_of_cache(cache, self.form) if reading.model.masked is None else FLOAT
        contents = native_contents(cache, ids.shape[0], reading.model, form)
        if isinstance(contents, str):
            self.paths[f"modules: {contents}"] += 1
            return None
        places = self._places(ids, contents.length, arguments, reading.model)
        if not isinstance(places, str) and not reading.model.has_position(places[2]):
            places = "a position without an embedding"
        if isinstance(places, str):
            self.paths[f"modules: {places}"] += 1
            return None
        store: Store = contents.static
        watched, unfused = reading.watch.watched(), reading.model.unfused
        if reading.model.masked is not None:
            reason = encoder_decoder.encoder_why_not(store, reading.model, given, len(ids))
            reason = reason or ("a hook inside" if watched else None)
            if reason is not None:
                self.paths[f"modules: {reason}"] += 1
                return None
        if watched or unfused:
            by_modules = sorted({*watched, *unfused})
            store.places = None
            logits = mixed_step(model, _step(reading, store), contents, cache, ids[:, 0], places, by_modules)
            reason = "a hook inside" if watched else unfused[by_modules[0]]
            self.paths[f"{NATIVE}, but modules in layers {by_modules}: {reason}"] += 1
            return logits.unsqueeze(1)
        store.places = places
        return self.advance(reading, contents, ids[:, 0]).unsqueeze(1)

    def run_of(self, given: Mapping[str, Any]) -> NativeRun | None:
        """A Run that continues the last native step over the cache among a call's arguments; None where that step was
        not native."""
        cache = getattr(given[CACHE], "self_attention_cache", given[CACHE])
        contents = attached(cache)
        native = contents is not None and isinstance(contents.static, Store) and contents.static.places is not None
        return NativeRun(self, cache, contents, given) if contents is not None and native else None

    def advance(self, reading: Reading, contents: Contents, tokens: Tensor) -> Tensor:
        """Logits [B, V] after `tokens`[B] at the store's present places."""
        store: Store = contents.static
        with all_threads():
            assert reading.model is not None
            slots, starts, positions = store.places
            logits = _step(reading, store)(tokens, slots, starts, reading.model.positions(tokens, positions))
        contents.grow()
        self.paths[NATIVE] += 1
        return logits

    def takes_format(self, model: nn.Module) -> bool:
        """Whether a call's cache may come to lie in a format that the call asks for."""
        return not encoder_decoder.encodes(model) and self.steps(model)

    def steps(self, model: nn.Module) -> bool:
        """Whether the model, as it is now, has native steps."""
        return self.reading(model).unfit is None

    def prepare(self, model: nn.Module) -> NativeModel | str:
        """Read the model's native steps now; returns their weights, or why there are none."""
        reading = self.reading(model)
        return reading.model or str(reading.unfit)

    def unfuse(self, failed: Mapping[int, str]) -> None:
        """Run the modules of these layers from now on: place -> why."""
        self.unfused = {**self.unfused, **failed}
        if failed and self._reading is not None and self._reading.model is not None:
            self._reading = replace(self._reading, model=self._reading.model.without(failed))

    def reading(self, model: nn.Module) -> Reading:
        """The Reading of the model, made anew where the model has changed."""
        reading = self._reading
        if reading is not None and not self._outdated(reading):
            return reading  # with no lock: the child of a fork would inherit one that another thread held
        with self._lock:
            if self._reading is None or self._outdated(self._reading):
                self.code.look_anew()
                try:
                    if encoder_decoder.encodes(model):
                        found, unfit = native_encoder_decoder(model), None
                    else:
                        found, unfit = native_model(model, self.unfused), None
                except (CannotFuse, KernelError) as reason:
                    found, unfit = None, str(reason)
                self._reading = Reading(found, unfit, Watch(model), self.code.version)
            return self._reading

    def _outdated(self, reading: Reading) -> bool:
        watch = reading.watch
        return reading.version != self.code.version or watch.stale() or watch.switched()

    def _places(self, ids: Tensor, length: int, arguments: Mapping[str, Any], model: NativeModel) -> Places | str:
        """(slots, starts, positions), each int64 [B]; or why there are none."""
        batch, mask, positions = ids.shape[0], arguments.get("attention_mask"), arguments.get("position_ids")
        slots = torch.full((batch,), length, dtype=torch.int64, device="cpu")
        starts = torch.zeros(batch, dtype=torch.int64, device="cpu")
        if mask is not None:
            if mask.dim() != 2 or tuple(mask.shape) != (batch, length + 1):
                return "an attention mask that is not left padding"
            kept = mask.ne(0)
            starts = length + 1 - kept.sum(1)
            if not torch.equal(kept.int().argmax(1), starts):
                return "an attention mask that is not left padding"
        if positions is None:
            return "no positions, which pictures before may have moved" if model.by_axes else (slots, starts, slots)
        positions = of_one_axis(positions)
        if positions is None:
            return "positions that differ between time, height and width"
        return slots, starts, positions.reshape(-1, 1)[-batch:, 0].expand(batch).to(torch.int64)


def _why_not(
    model: nn.Module, ids: Tensor, arguments: Mapping[str, Any], understood: frozenset[str] = UNDERSTOOD
) -> str | None:
    """Why a call cannot be a native step, judging by its arguments alone; None where it can."""
    extra = unknown(arguments, understood)
    if extra is not None and (extra := unknown(arguments, understood | unused_by_steps(model))) is not None:
        return f"the argument {extra}"
    if arguments.get("use_cache") is False or arguments.get("return_dict") is False:
        return "no cache or a tuple was asked for"
    configs, asked = configs_of_call(model), ("output_hidden_states", "output_attentions")
    if any(arguments.get(name) or any(getattr(one, name, None) for one in configs) for name in asked):
        return "attentions or hidden states were asked for"
    caching = arguments.get("use_cache") or all(getattr(one, "use_cache", True) for one in configs)
    if len(configs) > 1 and not caching:
        return "no cache was asked for"
    if arguments.get("position_ids") is None and (first := first_position(model)):
        return f"no positions, which begin at {first}"
    if ids.shape[0] > MAX_BATCH:
        return f"a batch of more than {MAX_BATCH}"
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return "gradients or autocast"
    return None


def _is_empty(cache: Any) -> bool:
    """Whether no cache holds tokens: linear attention (Mamba) counts none, nor do pages of continuous batching."""
    if not isinstance(cache, Cache) or all(getattr(cache, "is_linear", [False])):
        return True
    return bool(cache.get_seq_length() == 0)


def unknown(arguments: Mapping[str, Any], understood: Container[str]) -> str | None:
    """The first argument that is set but not in `understood`; None where there is none."""
    asking = (name for name, value in arguments.items() if value is not None and value is not False)
    return next((name for name in asking if name not in understood), None)


def _step(reading: Reading, store: Store) -> DecodeStep:
    assert reading.model is not None
    if store.step is None or store.made_by is not reading.model:
        encoded = None if store.encoder is None else store.encoder.encoded
        store.step, store.made_by = reading.model.step(store.keys, store.values, encoded=encoded), reading.model
        store.several = {}
    return store.step


class NativeRun:
    """Consecutive native steps over one cache; each checks first whether the model has changed."""

    def __init__(self, runtime: NativeRuntime, cache: Any, contents: Contents, given: Mapping[str, Any]):
        self._runtime, self._cache, self._contents, self._given = runtime, cache, contents, given
        self._slots, self._starts, self._positions = (place.clone() for place in contents.static.places)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor | None:
        """Logits [B, V] after `tokens`[B]; None where the model must be called."""
        contents, reading = self._contents, self._runtime.reading(model)
        store: Store = contents.static
        if contents.length >= store.capacity or not contents.are_of(self._cache) or reading.unfit is not None:
            return None
        if model._forward_hooks or model._forward_pre_hooks or reading.watch.objection() or reading.watch.watched():
            return None
        native, positions = reading.model, self._positions + 1
        assert native is not None
        if not native.has_position(positions) or not encoder_decoder.has_encoder(store, native, self._given):
            return None
        self._slots += 1
        self._positions = positions
        store.places = (self._slots, self._starts, self._positions)
        return self._runtime.advance(reading, contents, tokens)
