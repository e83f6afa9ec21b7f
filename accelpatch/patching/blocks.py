"""Runs a model's blocks one after the other: each on what the blocks before it give by now, and nothing twice.

A block is a member of a list of modules, such as a decoder layer. While one runs, those before it only give back what
the last of them gave: the model's own code makes everything else that a block gets (masks, rotary angles, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from accelpatch.patching.capture import Call, copied

_BLOCK = re.compile(r"(?P<block>(?P<list>.*?)\.\d+)(\.|$)")


def block_of(path: str) -> str | None:
    """The path of the block that a module is in; None for one outside."""
    found = _BLOCK.match(path)
    return None if found is None else found["block"]


def blocks_of(paths: Iterable[str]) -> dict[str, list[str]]:
    """block -> the paths in it, in their order; those outside of all blocks are left out."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if (block := block_of(path)) is not None:
            found.setdefault(block, []).append(path)
    return found


class _Done(Exception):
    """The block has run; what comes after it is not needed."""


class Blocks:
    """The blocks of `model`, on `batches`: each the keyword arguments of one call."""

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]):
        self._model, self._batches = model, batches
        self._outputs: dict[str, list[Any]] = {}  # list of blocks -> what the last finished one gave, of each batch
        self._finished: dict[str, list[nn.Module]] = {}

    def run(self, block: str, finish: bool, step: Callable[[], None]) -> None:
        """Run a block on all batches. finish: its outputs are what those after it get; step: called after each batch.

        Raises what the model raises.
        """
        module, given = self._model.get_submodule(block), list[Any]()

        def after(_: nn.Module, args: Any, output: Any) -> None:
            given.append(output)
            raise _Done

        hook = module.register_forward_hook(after)
        try:
            for place, batch in enumerate(self._batches):
                with torch.no_grad(), self._replaying(place), suppress(_Done):
                    self._model(**copied(Call((), dict(batch))).kwargs)
                step()
        finally:
            hook.remove()
        if finish:
            name = block.rpartition(".")[0]
            self._outputs[name] = given
            self._finished.setdefault(name, []).append(module)

    def outputs(self) -> Iterator[Any]:
        """What the model gives for each batch, with the blocks that are finished not run again."""
        for place, batch in enumerate(self._batches):
            with torch.no_grad(), self._replaying(place):
                output = self._model(**copied(Call((), dict(batch))).kwargs)
            yield output

    @contextmanager
    def _replaying(self, place: int) -> Iterator[None]:
        """Context manager: finished blocks give what the last one in their list gave for the batch at `place`."""
        kept: list[tuple[nn.Module, Any]] = []
        try:
            for name, modules in self._finished.items():
                output = self._outputs[name][place]
                for module in modules:
                    kept.append((module, vars(module).get("forward")))
                    module.__dict__["forward"] = lambda *args, output=output, **kwargs: output
            yield
        finally:
            for module, own in kept:
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own
