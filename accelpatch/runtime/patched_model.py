"""The class that a patched model has: its own, with faster steps, and with what would silently go wrong refused."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.errors import PatchError
from accelpatch.runtime.torch_threads import all_threads, one_thread

RUNTIME = "_accelpatch_runtime"  # the attribute of a patched model that holds its runtime


def patched_class(model: nn.Module) -> type[nn.Module]:
    """A subclass of the model's class under the same name; setting the class back undoes it."""
    cls: Any = type(model)
    return _subclass(cls)


@functools.cache
def _subclass(cls: Any) -> type[nn.Module]:
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    refused = {name: _refusing(name, advice) for name, advice in REFUSED.items() if hasattr(cls, name)}
    kept = {"tie_weights": _keep_ties} if hasattr(cls, "tie_weights") else {}
    loops = {"_sample": _quiet(cls._sample)} if hasattr(cls, "_sample") else {}
    return type(cls.__name__, (cls,), body | refused | kept | loops | {"forward": _stepping(cls)})


def _quiet(loop: Any) -> Any:
    """A generation loop between whose steps torch's threads leave the cores to the native ones."""

    @functools.wraps(loop)
    def quiet(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runtime = vars(self).get(RUNTIME)
        with one_thread() if runtime is not None and runtime.steps(self) else nullcontext():
            return loop(self, *args, **kwargs)

    return quiet


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
