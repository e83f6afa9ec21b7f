"""Collectives around a module's own forward: hooks of torch, which stay when the module is replaced.

A fused layer calls no modules: it takes `across` off the hook of the module that it stands for.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.parallel.group import Group


class Across:
    """Base: a forward hook whose `across` turns a rank's part of the output into that of all ranks."""

    of_accelpatch = True  # fast paths do the same

    def __init__(self, group: Group, model: nn.Module):
        self.group, self._model = group, weakref.ref(model)

    def __deepcopy__(self, memo: Any) -> Across:
        return self

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        model = self._model()
        if model is not None and "peft_config" in vars(model):
            raise PatchError(
                "adapters on a model that is split among ranks would compute with parts of theirs: merge them before "
                "(accelpatch.merge, or merge_and_unload of PEFT), and load the result with parallel='tp'"
            )
        if output.requires_grad:
            made: Tensor = _NoBackward.apply(output, self)
            return made
        return self.across(output)

    def across(self, part: Tensor) -> Tensor:
        """The output of all ranks, of this rank's part."""
        raise NotImplementedError


class AddUp(Across):
    """Adds up what the ranks computed of their columns of a weight."""

    def across(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks, plus residual; may write into `part`."""
        return self.group.all_reduce_(part.contiguous(), residual)


class Gather(Across):
    """Puts the ranks' parts of the logits side by side. sizes: of each rank's part."""

    def __init__(self, group: Group, model: nn.Module, sizes: list[int]):
        super().__init__(group, model)
        self.sizes = sizes

    def across(self, part: Tensor) -> Tensor:
        """[..., V] of logits[..., a rank's part of V]."""
        return self.group.gather(part, self.sizes)


class LookUp(AddUp):
    """Of an embedding whose rows are split: rows that another rank has count as zeros, and all are added up.

    rows: this rank's.
    """

    def __init__(self, group: Group, model: nn.Module, rows: range):
        super().__init__(group, model)
        self.rows = rows
        self._outside: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        """A forward pre-hook: ids among this rank's rows."""
        (ids,) = args
        self._outside = (ids < self.rows.start) | (ids >= self.rows.stop)
        return ((ids - self.rows.start).masked_fill(self._outside, 0),)

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook."""
        outside, self._outside = self._outside, None
        assert outside is not None
        return super().__call__(module, args, output.masked_fill(outside.unsqueeze(-1), 0))


class Begin:
    """The hook before an embedding, which LookUp ends."""

    of_accelpatch = True

    def __init__(self, lookup: LookUp):
        self.lookup = lookup

    def __deepcopy__(self, memo: Any) -> Begin:
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        return self.lookup.before(module, args)


class _NoBackward(torch.autograd.Function):
    """An output of all ranks whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, across: Across) -> Tensor:
        return across.across(part.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise PatchError("a model that is split among ranks is not trained: train it whole, or by data parallel")
