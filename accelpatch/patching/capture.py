"""Runs of the whole model that record what reaches a site; the hooks never outlive the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Call(NamedTuple):
    """One call of a module: its positional and keyword arguments, copied."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def copied(call: Call) -> Call:
    """The same call with tensors and key-value caches of its own: a model writes into both."""

    def copy_one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value

    args, kwargs = tree_map(copy_one, (call.args, call.kwargs))
    return Call(args, kwargs)


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Record each call of `modules` (path -> module) as path -> calls while the context lasts.

    Tensors are cloned, since a model may go on to write into them. Every hook is removed at the end.
    """
    calls: dict[str, list[Call]] = {path: [] for path in modules}

    def hook_for(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path].append(copied(Call(args, kwargs)))

        return hook

    handles = []
    try:
        for path, module in modules.items():
            handles.append(module.register_forward_pre_hook(hook_for(path), with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def run(model: nn.Module, inputs: Sequence[Mapping[str, Any]], progress: Callable[[int, int], None]) -> list[Any]:
    """Run `model` on each of `inputs` without a cache; returns the outputs."""
    outputs = []
    for done, batch in enumerate(inputs):
        with torch.no_grad():
            outputs.append(model(**batch))
        progress(done + 1, len(inputs))
    return outputs
