"""The class of a patched model: a subclass of its own that runs fast steps and refuses what would silently go wrong."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from accelpatch.fusion.cache_name import CACHE, behind_checks
from accelpatch.fusion.packed_rows import without_padding
from accelpatch.models.multimodal import is_multimodal
from accelpatch.modules.adapted_linear import wrappers_in
from accelpatch.modules.attention import WEIGHTS
from accelpatch.modules.attention_settings import originals
from accelpatch.modules.quantized_module import take_over
from accelpatch.modules.replacement import COPIED, copied_by, copy_with_parts
from accelpatch.runtime import chunked_loss
from accelpatch.runtime.cache_contents import OWN_CACHE
from accelpatch.runtime.code_watch import CODE, CodeWatch
from accelpatch.runtime.compiled import with_static_cache
from accelpatch.runtime.continuous.pages import is_paged, longest
from accelpatch.runtime.continuous.step import outputs as over_pages
from accelpatch.runtime.cpu.native_step import NativeRuntime
from accelpatch.runtime.cpu.torch_threads import all_threads, one_thread
from accelpatch.runtime.generation.adapter_targets import CONFIGS, adapter_configs
from accelpatch.runtime.generation.assisted import NAME as ASSISTED
from accelpatch.runtime.generation.assisted import assisting
from accelpatch.runtime.generation.batching import CONTEXT, INIT, in_context, initialised
from accelpatch.runtime.generation.decoding import decode, native_loop_because
from accelpatch.runtime.generation.graph_loop import captured_loop
from accelpatch.runtime.generation.mtp_heads import NAME as CANDIDATES
from accelpatch.runtime.generation.mtp_heads import making_candidates
from accelpatch.runtime.generation.weight_methods import (
    PATCHED,
    REFUSED,
    marking_packed,
    moving,
    naming_ties,
    refusing,
    saving,
    tying,
)
from accelpatch.runtime.graphs.capture import GRAPHS
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.quantized_cache import FORMAT, TAKEN, format_asked, with_dynamic_cache

RUNTIME = "_accelpatch_runtime"  # the attribute of a patched model that holds its runtime
WITHOUT_PADDING = "without padding"
CACHES = "_prepare_cache_for_generation"  # transformers' method that makes the cache of a call


def new_runtime(device_type: str, settings: Any, begin: Any = None) -> NativeRuntime | CapturedRuntime:
    """The runtime for a torch device type: captured graphs where the device has them, else native CPU steps.

    settings: a recipe's Runtime, or any object with its fields graph, cache, max_length, speculate, kv_cache, loss and
    padding.
    begin: called with ids and configuration before generate() decodes; None for nothing.
    """
    if device_type in GRAPHS:
        given = (settings.graph, settings.cache, settings.max_length, settings.speculate, settings.kv_cache)
        made: Any = CapturedRuntime(*given)
    else:
        made = NativeRuntime(settings.kv_cache)
    made.loss, made.padding, made.begin = settings.loss, settings.padding, begin
    return made


def patched_classes(model: nn.Module, runtime: NativeRuntime | CapturedRuntime) -> list[tuple[nn.Module, str, Any]]:
    """(module, attribute, value) to set on a model and the models inside it: a mark, its runtime, and the subclass as
    `__class__`.

    Restoring the attributes undoes it. Models inside refuse the same methods as the whole.
    """
    runtime.code = CodeWatch(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or is_multimodal(model):
        runtime.code.runtime = weakref.ref(runtime)
    found: list[tuple[nn.Module, str, Any]] = [(model, RUNTIME, runtime)]
    for one in with_parts(model):
        new = _subclass(cast(Any, type(one)), is_model=one is model)
        found += [(one, PATCHED, True), (one, CODE, runtime.code), (one, "__class__", new)]
        if "_old_forward" in vars(one):  # what accelerate's wrapper calls
            found.append((one, "_old_forward", types.MethodType(cast(Any, new).forward, one)))
    return [*found, *((wrapper, "__class__", kind) for wrapper, kind in wrappers_in(model))]


def with_parts(model: nn.Module) -> list[nn.Module]:
    """The models inside a model, then the model itself."""
    return [*(part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model), model]


@functools.cache
def _subclass(cls: Any, is_model: bool) -> type[nn.Module]:
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {name: refusing(getattr(cls, name), advice) for name, advice in REFUSED.items() if hasattr(cls, name)}
    body |= {"tie_weights": tying(cls.tie_weights)} if hasattr(cls, "tie_weights") else {}
    body |= {"named_parameters": naming_ties(cls), "requires_grad_": marking_packed(cls)}
    body |= {CONFIGS: adapter_configs()}
    body |= {"__reduce_ex__": copied_by(_copy_of_model if is_model else _copy_of_part), "unpatched_class": cls}
    wrapped = {INIT: initialised, CONTEXT: in_context}
    body |= {name: wrap(cls, name) for name, wrap in wrapped.items() if hasattr(cls, name)}
    if is_model:
        body["_apply"] = moving(cls._apply)
        wrapped = {"_sample": _looping, ASSISTED: assisting, CACHES: _marking, "generate": _generating}
        wrapped[CANDIDATES] = making_candidates
        body |= {name: wrap(cls, name) for name, wrap in wrapped.items() if hasattr(cls, name)}
        body |= {"save_pretrained": saving(cls.save_pretrained)} if hasattr(cls, "save_pretrained") else {}
        body |= {"push_to_hub": cls.push_to_hub} if hasattr(cls, "push_to_hub") else {}
    body["forward"] = _stepping(cls) if is_model else _looked_at_once(cls, "forward")
    body["forward"] = _weighing(cls, body["forward"])
    return type(cls)(cls.__name__, (cls,), body)


def _copy_of_model(self: nn.Module, memo: dict[Any, Any]) -> Any:
    """A deep copy of a patched model, patched too."""
    take_over(self)
    memo.setdefault(COPIED, set()).update(id(module) for module in self.modules())
    return copy_with_parts(self, memo)


def _copy_of_part(self: Any, memo: dict[Any, Any]) -> Any:
    """As part of a whole model's copy, an equal part; copied alone, the plain model, which nobody could unpatch."""
    made = copy_with_parts(self, memo)
    if id(self) not in memo.get(COPIED, ()):
        made.__class__ = type(self).unpatched_class
    return made


def _looked_at_once(cls: Any, name: str) -> Any:
    """Wraps a method of `cls`: where it is the outermost call, the model's CodeWatch looks once before it."""

    @functools.wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = vars(self).get(CODE)
        if code is not None and torch.compiler.is_compiling():
            code.look_as_compiled()
        if code is None or torch.compiler.is_compiling():
            return getattr(cls, name)(self, *args, **kwargs)
        with code:
            runtime = None if name != "forward" or code.runtime is None else code.runtime()
            outputs = None if runtime is None else runtime.part_outputs(self, arguments(cls.forward, args, kwargs))
            return getattr(cls, name)(self, *args, **kwargs) if outputs is None else outputs

    return behind_checks(getattr(cls, name), call)


def _generating(cls: Any, name: str) -> Any:
    """Wraps generate() as `_looked_at_once` does, and as `_weighing` does: masks of static caches are made before the
    model is called."""
    stock = _looked_at_once(cls, name)

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or getattr(self, "generation_config", None)
        wanted = kwargs.get(WEIGHTS, getattr(config, WEIGHTS, None))
        if getattr(vars(self).get(RUNTIME), "static_cache", False):
            kwargs = with_static_cache(self, kwargs)
        with originals(self) if wanted else nullcontext():
            return stock(self, *args, **kwargs)

    return generate


def _marking(cls: Any, name: str) -> Any:
    """Wraps generate()'s cache creation and marks the cache: only generate()'s result can expose it."""

    @functools.wraps(getattr(cls, name))
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        brought, runtime = model_kwargs.get(CACHE), vars(self).get(RUNTIME)
        form = None if runtime is None or brought is not None else format_asked(generation_config)
        if form is not None and not runtime.takes_format(self):
            form = None
        given = generation_config if form is None else with_dynamic_cache(generation_config)
        prepared = getattr(cls, name)(self, given, model_kwargs, *args, **kwargs)
        cache: Any = model_kwargs.get(CACHE)
        if form is not None:
            setattr(cache, FORMAT, form)
            runtime.paths[TAKEN.format(form)] += 1
        parts = [cache.self_attention_cache] if type(cache) is EncoderDecoderCache else [cache]
        for part in parts:
            if type(part) is DynamicCache:
                setattr(part, OWN_CACHE, brought is None)  # one that an earlier call returned is marked already
        return prepared

    return prepare


def _looping(cls: Any, name: str) -> Any:
    """Wraps generate()'s `_sample`: accelpatch's loop over fast steps where possible, else the stock one.

    Between CPU steps, torch's threads are kept off the cores that the native ones need.
    """

    @functools.wraps(getattr(cls, name))
    def sample(
        self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        runtime, stock = vars(self).get(RUNTIME), getattr(cls, name)
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if runtime is not None and runtime.begin is not None:
            runtime.begin(input_ids, generation_config)
        if isinstance(runtime, CapturedRuntime):
            return captured_loop(self, runtime, functools.partial(stock, self), given, synced_gpus, streamer, kwargs)
        if runtime is None or not runtime.steps(self):
            return stock(self, *given, synced_gpus, streamer, **kwargs)
        with one_thread():
            if (reason := native_loop_because(self, generation_config, synced_gpus, kwargs)) is None:
                return decode(self, runtime, *given, streamer, kwargs)
            runtime.paths[f"stock loop: {reason}"] += 1
            return stock(self, *given, synced_gpus, streamer, **kwargs)

    return sample


def _stepping(cls: Any) -> Any:
    """The forward of `cls`, which lets the model's runtime take the calls that it can run."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runtime = vars(self).get(RUNTIME)
        if torch.compiler.is_compiling():  # torch.compile traces the modules
            if runtime is not None:
                runtime.code.look_as_compiled()
            return cls.forward(self, *args, **kwargs)
        if runtime is None:
            return cls.forward(self, *args, **kwargs)
        given = arguments(cls.forward, args, kwargs)
        paged = given if given is not None and is_paged(given) else None
        with runtime.code.step() if paged is not None and longest(paged) == 1 else runtime.code:
            if paged is not None:
                outputs = over_pages(runtime, cls.forward, self, paged)
                if outputs is not None:
                    return outputs
            packing = None if given is None else runtime.packing(self, given)
            if packing is not None:
                runtime.paths[WITHOUT_PADDING] += 1
                with all_threads(), without_padding(packing):
                    return cls.forward(self, *args, **kwargs)
            outputs = None if given is None else runtime.outputs(self, given)
            if outputs is not None:
                return outputs
            with all_threads(), runtime.checkpointed(self):
                if runtime.loss == "chunked" and given is not None:
                    outputs = chunked_loss.outputs(self, given)
                if outputs is None and runtime.code.others:
                    runtime.paths[f"modules of other code: {runtime.code.others}"] += 1
                return runtime.modules(cls.forward, self, args, kwargs) if outputs is None else outputs

    return behind_checks(cls.forward, forward)


def _weighing(cls: Any, forward: Any) -> Any:
    """Wraps a forward: where attention weights are asked for, the originals' attention runs, which may make them."""

    @functools.wraps(forward)
    def weighed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        wanted = (dict(zip(positional(cls.forward), args, strict=False)) | kwargs).get(WEIGHTS)
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), WEIGHTS, False)
        with originals(self) if wanted else nullcontext():
            return forward(self, *args, **kwargs)

    return weighed


def arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name; None where the call is wrong."""
    names = positional(forward)
    if len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        return None
    return dict(zip(names, args, strict=False)) | kwargs


def positional(forward: Any) -> list[str]:
    """Names of the arguments of a model's forward that may be given by position, besides the model."""
    return _positional(forward) if isinstance(forward, types.FunctionType) else _positional.__wrapped__(forward)


@functools.lru_cache
def _positional(forward: Any) -> list[str]:
    every = list(inspect.signature(forward).parameters.values())[1:]
    return [one.name for one in every if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
