"""A layer that computes by few kernels once its weights are laid out, and by its modules what those do not cover.

It stands where its original stood. Before each call it looks whether its modules and their weights are those that were
laid out; weights that moved are laid out anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.modules.replacement import Replacement, is_observed

_LOCK = threading.RLock()
Computed = TypeVar("Computed")


class LaidOutLayer(Replacement, Generic[Computed]):
    """The module in the place of a layer.

    wanted: whether it runs fused, once its weights are laid out. positional: names of its forward's arguments after the
    hidden states, in their order.
    """

    transient: tuple[str, ...] = ("_fused", "_seen", "_dropouts", "_held")
    positional: tuple[str, ...]
    wanted: bool
    _fused: Computed | None = None
    _seen: tuple[tuple[nn.Module, str, nn.Module], ...] = ()
    _dropouts: tuple[nn.Dropout, ...] = ()
    _held: tuple[Any, ...] = ()

    def read(self) -> Computed:
        """What the layer computes, its weights laid out. Raises CannotFuse."""
        raise NotImplementedError

    def weights(self) -> tuple[Any, ...]:
        """Where its linear layers and norms have their weights: equal as long as they lie there."""
        raise NotImplementedError

    def lay_out(self) -> Computed:
        """Concatenate weights and read the layer; raises CannotFuse where it has no fused form."""
        with _LOCK, torch.inference_mode(False):  # or two threads would each concatenate what the other reads
            fused = self._fused
            if fused is not None and self._is_fresh():
                return fused
            try:
                fused = self.read()
            except CannotFuse:
                self.wanted = False
                raise
            self._seen = tuple(_children(self))
            self._dropouts = tuple(child for _, _, child in self._seen if isinstance(child, nn.Dropout))
            self._fused, self.wanted = fused, True
            self._held = self.weights()
            return fused

    def run_modules(self) -> None:
        """Run the original's forward from now on."""
        self.wanted, self._fused = False, None

    @property
    def is_fused(self) -> bool:
        """Whether calls that the fused form covers run it."""
        return self.wanted

    def fused_now(self, x: Tensor | None = None) -> Computed | None:
        """What the layer computes by the weights that it has now; None where it must run its modules, on x."""
        if not self.wanted or self.training or not is_eager() or vars(self).get("_is_replica", False):
            return None
        if torch.is_grad_enabled() and wants_gradient((x, *self.parameters())):
            return None
        fused: Any = self._fused
        if fused is None or not self._is_fresh():
            try:
                fused = self.lay_out()
            except CannotFuse:
                return None
        if not self._intact() or torch.is_autocast_enabled(fused.device.type):
            return None
        found: Computed | None = fused if x is None or x.dtype == fused.dtype else None
        return found

    def _is_fresh(self) -> bool:
        """Whether it has the weights that were laid out."""
        held, now = self._held, self.weights()
        return len(held) == len(now) and all(a is b or a == b for a, b in zip(held, now, strict=True))

    def _intact(self) -> bool:
        """Whether its modules are those that were read, nobody watches them, and none drops anything."""
        same = all(parent._modules.get(name) is child for parent, name, child in self._seen)
        if not same or any(one.training and one.p for one in self._dropouts):
            return False
        return not is_observed(*(child for _, _, child in self._seen))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._held = ()  # its weights move one by one: they are concatenated again
        return super()._apply(fn, recurse)


def held_by(part: Any) -> Any:
    """Where a linear layer or norm has its weight: the same object, or equal, as long as that is the same."""
    if hasattr(part, "own_layout"):
        return part.layout
    own = (None if one is None else one.data_ptr() for one in map(part._parameters.get, ("weight", "bias")))
    return (*own, getattr(part, "eps", None))


def _children(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of all modules in a layer."""
    return [
        (parent, name, child) for parent in layer.modules() for name, child in parent._modules.items()
        if child is not None
    ]  # fmt: skip
