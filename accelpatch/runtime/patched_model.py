"""The class that a patched model has: its own, with faster steps, and with what would silently go wrong refused."""

from __future__ import annotations

import copyreg
import functools
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.errors import PatchError
from accelpatch.runtime.captured_cache import OWN
from accelpatch.runtime.captured_decoding import captured_loop
from accelpatch.runtime.captured_graph import GRAPHS
from accelpatch.runtime.captured_runtime import CapturedRuntime
from accelpatch.runtime.decoding import decode, stock_loop_because
from accelpatch.runtime.native_step import NativeRuntime
from accelpatch.runtime.torch_threads import all_threads, one_thread

RUNTIME = "_accelpatch_runtime"  # the attribute of a patched model that holds its runtime
CACHES = "_prepare_cache_for_generation"  # transformers' method that makes the cache of a call


def new_runtime(device_type: str, settings: Any) -> NativeRuntime | CapturedRuntime:
    """What makes a patched model's steps fast on a device of torch's type: graphs where there are any.

    settings: with the fields of a recipe's `runtime`: graph, cache, max_length and speculate.
    """
    if device_type in GRAPHS:
        return CapturedRuntime(settings.graph, settings.cache, settings.max_length, settings.speculate)
    return NativeRuntime()


def patched_class(model: nn.Module) -> type[nn.Module]:
    """A subclass of the model's class under the same name; setting the class back undoes it."""
    cls: Any = type(model)
    return _subclass(cls)


@functools.cache
def _subclass(cls: Any) -> type[nn.Module]:
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    refused = {name: _refusing(name, advice) for name, advice in REFUSED.items() if hasattr(cls, name)}
    kept = {"tie_weights": _keep_ties} if hasattr(cls, "tie_weights") else {}
    loops = {"_sample": _looping(cls._sample)} if hasattr(cls, "_sample") else {}
    caches = {name: _marking(getattr(cls, name)) for name in (CACHES,) if hasattr(cls, name)}
    body |= refused | kept | loops | caches | {"forward": _stepping(cls)}
    kind: Any = type(cls)
    return _unpicklable(kind)(cls.__name__, (cls,), body)


@functools.cache
def _unpicklable(kind: Any) -> Any:
    """A kind of classes whose instances pickle refuses in our words; copies do not ask it."""
    made = type("PatchedClass", (kind,), {})
    copyreg.pickle(made, _refuse_pickle)
    return made


def _refuse_pickle(patched: type) -> str:
    raise PatchError(
        f"a patched {patched.__name__} cannot be pickled (torch.save, an argument of another process): call "
        "accelpatch.unpatch(model) and save the original, or patch it where it is used"
    )


def _marking(stock: Any) -> Any:
    """What makes the cache of a call of generate() that brings none; it is marked: only the result can show it."""

    @functools.wraps(stock)
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        brought = model_kwargs.get("past_key_values")
        prepared = stock(self, generation_config, model_kwargs, *args, **kwargs)
        if type(cache := model_kwargs.get("past_key_values")) is DynamicCache:
            setattr(cache, OWN, brought is None)  # one that an earlier call returned is marked already
        return prepared

    return prepare


def _looping(stock: Any) -> Any:
    """generate()'s loop of greedy decoding and sampling: ours over native steps where it can be, else the stock one.

    Between the steps of either, torch's threads leave the cores to the native ones.
    """

    @functools.wraps(stock)
    def sample(
        self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        runtime = vars(self).get(RUNTIME)
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if isinstance(runtime, CapturedRuntime):
            return captured_loop(self, runtime, functools.partial(stock, self), given, synced_gpus, streamer, kwargs)
        if runtime is None or not runtime.steps(self):
            return stock(self, *given, synced_gpus, streamer, **kwargs)
        with one_thread():
            if (reason := stock_loop_because(self, generation_config, synced_gpus, kwargs)) is None:
                return decode(self, runtime, *given, streamer, kwargs)
            runtime.paths[f"stock loop: {reason}"] += 1
            return stock(self, *given, synced_gpus, streamer, **kwargs)

    return sample


def _stepping(cls: Any) -> Any:
    """The forward of `cls`, with single-token steps left to the model's runtime where it takes them."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the graph is made of the modules
            return cls.forward(self, *args, **kwargs)
        runtime = vars(self).get(RUNTIME)
        logits = runtime.logits(self, kwargs) if runtime is not None and not args else None
        if logits is None:
            with all_threads():
                return cls.forward(self, *args, **kwargs)
        return CausalLMOutputWithPast(logits=logits, past_key_values=kwargs["past_key_values"])

    return forward


# transformers would write tensors under names that it cannot read back, or grow a table that is packed.
REFUSED = {
    "save_pretrained": "has no format for a patched model yet; call accelpatch.unpatch(model) and save the original",
    "push_to_hub": "has no format for a patched model yet; call accelpatch.unpatch(model) and push the original",
    "resize_token_embeddings": "would change packed weights; call accelpatch.unpatch(model), resize, and patch again",
}


def _refusing(name: str, advice: str) -> Any:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise PatchError(f"{name} {advice}")

    refuse.__name__ = name
    return refuse


def _keep_ties(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Tied replacements share one pack already; transformers would put a float weight back beside it."""
