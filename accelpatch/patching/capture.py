"""Runs the whole model and records the calls of its sites by forward hooks, which are removed at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


class Call(NamedTuple):
    """One recorded call of a module: copies of its positional and keyword arguments and its floating-point outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...] = ()


def first_of(call: Call) -> Any:
    """The first argument of a call, positional or by keyword."""
    return call.args[0] if call.args else next(iter(call.kwargs.values()))


def copied(call: Call) -> Call:
    """A call with its own copies of tensors and KV caches, since a model writes into both."""

    def copy_one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value

    args, kwargs = tree_map(copy_one, (call.args, call.kwargs))
    return Call(args, kwargs)


def floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a module's output."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from floats(item)


@contextmanager
def _hooked(
    modules: Mapping[str, nn.Module], before: Callable[[str, Call], None], after: Callable[[str, Any], None],
    unhooked: bool,
) -> Iterator[None]:  # fmt: skip
    """Context manager: calls `before(path, call)` and `after(path, output)` at each call of these modules.

    unhooked: `after` gets the output of the module's forward, before the user's hooks change it; else after them.
    """
    handles: list[RemovableHandle] = []
    try:
        for path, module in modules.items():

            def on_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
                before(path, Call(args, kwargs))

            def on_output(_: nn.Module, args: tuple[Any, ...], output: Any, path: str = path) -> None:
                after(path, output)

            handles.append(module.register_forward_pre_hook(on_call, with_kwargs=True))
            handles.append(module.register_forward_hook(on_output, prepend=unhooked))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Context manager: records every call of `modules` (path -> module) in the returned dict path -> calls.

    Tensors are cloned, since the model may write into them later. Outputs are those of the module's own forward, before
    the user's hooks change them.
    """
    calls: dict[str, list[Call]] = {path: [] for path in modules}

    def after(path: str, output: Any) -> None:
        given = tuple(tensor.detach().clone() for tensor in floats(output))
        calls[path][-1] = calls[path][-1]._replace(outputs=given)

    with _hooked(modules, lambda path, call: calls[path].append(copied(call)), after, unhooked=True):
        yield calls


@contextmanager
def watching(model: nn.Module, see: Mapping[str, Callable[[Call], None]]) -> Iterator[None]:
    """Context manager: `see[path]` gets every call of the module at `path` before it runs; nothing is kept."""

    def before(path: str, call: Call) -> None:
        see[path](call)

    with _hooked({path: model.get_submodule(path) for path in see}, before, lambda path, output: None, unhooked=False):
        yield


@contextmanager
def observing(
    model: nn.Module, paths: Sequence[str], see: Callable[[str, Tensor], None],
    outputs: Collection[str], see_output: Callable[[str, Tensor], None],
) -> Iterator[None]:  # fmt: skip
    """Context manager: `see(path, x)` gets the input of every call of these modules, `see_output(path, y)` the output
    of those among `outputs`; nothing is kept."""

    def before(path: str, call: Call) -> None:
        see(path, first_of(call))

    def after(path: str, output: Any) -> None:
        if path in outputs:
            see_output(path, next(floats(output)))

    with _hooked({path: model.get_submodule(path) for path in paths}, before, after, unhooked=False):
        yield


def run(
    model: nn.Module, inputs: Sequence[Mapping[str, Any]], progress: Callable[[int, int], None], keep: bool = True
) -> list[Any]:
    """Run `model` on copies of `inputs`, each the keyword arguments of one call; returns the outputs, if kept."""
    outputs = []
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    for done, batch in enumerate(inputs):
        with torch.no_grad(), torch.random.fork_rng([] if device is None else [device]):  # models may draw numbers
            output = model(**copied(Call((), dict(batch))).kwargs)
        if keep:
            outputs.append(output)
        del output
        progress(done + 1, len(inputs))
    return outputs
