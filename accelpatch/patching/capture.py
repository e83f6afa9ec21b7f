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
    """One call of a module: copies of its positional and keyword arguments, and of the float tensors that it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...] = ()


def copied(call: Call) -> Call:
    """The same call with tensors and key-value caches of its own: a model writes into both."""

    def copy_one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value

    args, kwargs = tree_map(copy_one, (call.args, call.kwargs))
    return Call(args, kwargs)


def floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors in what a module returns."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from floats(item)


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Record each call of `modules` (path -> module) as path -> calls while the context lasts.

    Tensors are cloned, since a model may go on to write into them. What a module gave is that of its own forward,
    before any hook of the user's. Every hook is removed at the end.
    """
    calls: dict[str, list[Call]] = {path: [] for path in modules}

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path].append(copied(Call(args, kwargs)))

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            given = tuple(tensor.detach().clone() for tensor in floats(output))
            calls[path][-1] = calls[path][-1]._replace(outputs=given)

        return hook

    handles = []
    try:
        for path, module in modules.items():
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
            handles.append(module.register_forward_hook(after(path), prepend=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def run(model: nn.Module, inputs: Sequence[Mapping[str, Any]], progress: Callable[[int, int], None]) -> list[Any]:
    """Run `model` on a copy of each of `inputs`, keyword arguments of a call; returns the outputs."""
    outputs = []
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    for done, batch in enumerate(inputs):
        with torch.no_grad(), torch.random.fork_rng([] if device is None else [device]):  # some models draw numbers
            outputs.append(model(**copied(Call((), dict(batch))).kwargs))
        progress(done + 1, len(inputs))
    return outputs
