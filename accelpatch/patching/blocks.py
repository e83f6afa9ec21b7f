"""Runs a model's blocks one after the other, each on the current outputs of those before it, without rerunning them.

A block is a member of a list of modules, such as a decoder layer. To run one, the model is called, and every finished
block only returns the recorded output of the last finished one. So the model's own code makes the other arguments of a
block (masks, rotary angles, ...).
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
    """Path of a block -> the paths in it, in their order; paths outside all blocks are left out."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if (block := block_of(path)) is not None:
            found.setdefault(block, []).append(path)
    return found


class _Done(Exception):
    """Raised once the block has run, to end the model's forward."""


class Blocks:
    """The blocks of `model`, on `batches`: each the keyword arguments of one call."""

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]):
        self._model, self._batches = model, batches
        self._outputs: dict[
            str, list[Any]
        ] = {}  # path of a list of blocks -> outputs of its last finished block, one a batch
        self._finished: dict[str, list[nn.Module]] = {}

    def run(self, block: str, finish: bool, step: Callable[[], None]) -> None:
        """Run a block on all batches. finish: keep its outputs as the input of the next block. step: called after each
        batch.

        Raises what the model raises.
        """
        module, outputs = self._model.get_submodule(block), list[Any]()

        def after(_: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            raise _Done

        hook = module.register_forward_hook(after)
        try:
            for index, batch in enumerate(self._batches):
                with torch.no_grad(), self._replaying(index), suppress(_Done):
                    self._model(**copied(Call((), dict(batch))).kwargs)
                step()
        finally:
            hook.remove()
        if finish:
            name = block.rpartition(".")[0]
            self._outputs[name] = outputs
            self._finished.setdefault(name, []).append(module)

    def outputs(self) -> Iterator[Any]:
        """The model's output for each batch; finished blocks are not run again."""
        for index, batch in enumerate(self._batches):
            with torch.no_grad(), self._replaying(index):
                output = self._model(**copied(Call((), dict(batch))).kwargs)
            yield output

    @contextmanager
    def _replaying(self, index: int) -> Iterator[None]:
        """Context manager: finished blocks return the output of the last one in their list for batch number `index`."""
        kept: list[tuple[nn.Module, Any]] = []
        try:
            for name, modules in self._finished.items():
                output = self._outputs[name][index]
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
