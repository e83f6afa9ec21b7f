"""A layer that runs fused once its weights are concatenated, and by its modules where the fused form does not apply.

It takes the place of its original. Before each call it checks that its modules and their weights are those that were
read; weights that have moved are concatenated again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from operator import contains, is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.modules.replacement import HOOKS, Replacement, is_observed

_LOCK = threading.RLock()
Computed = TypeVar("Computed")


class LaidOutLayer(Replacement, Generic[Computed]):
    """The module in the place of a layer.

    wanted: whether it runs fused, once its weights are laid out. positional: names of its forward's arguments after the
    hidden states, in their order.
    """

    transient: tuple[str, ...] = ("_fused", "_laid")
    positional: tuple[str, ...]
    wanted: bool
    _fused: Computed | None = None
    _laid: _Laid | None = None

    def read(self) -> Computed:
        """Concatenate the weights and return the fused layer. Raises CannotFuse."""
        raise NotImplementedError

    def parts(self) -> Sequence[Any]:
        """The linear layers and norms that are read, and other parameters that are."""
        raise NotImplementedError

    def lay_out(self) -> tuple[Computed, _Laid]:
        """Concatenate weights and read the layer; raises CannotFuse where it has no fused form."""
        with _LOCK, torch.inference_mode(False):  # else two threads would each concatenate what the other reads
            fused, laid = self._fused, self._laid
            if fused is not None and laid is not None and laid.is_fresh():
                return fused, laid
            try:
                fused = self.read()
            except CannotFuse:
                self.wanted = False
                raise
            self._fused, self.wanted = fused, True
            self._laid = laid = _Laid(self, self.parts())
            return fused, laid

    def run_modules(self) -> None:
        """Run the original's forward from now on."""
        self.wanted, self._fused = False, None

    @property
    def is_fused(self) -> bool:
        """Whether calls to which the fused form applies run it."""
        return self.wanted

    def fused_now(self, x: Tensor | None = None) -> Computed | None:
        """The fused layer with the present weights; None where x must run through the modules."""
        if not self.wanted or self.training or not is_eager() or vars(self).get("_is_replica", False):
            return None
        if torch.is_grad_enabled() and wants_gradient((x, *self.parameters())):
            return None
        fused: Any
        fused, laid = self._fused, self._laid  # another thread may move the model meanwhile
        if fused is None or laid is None or not laid.is_fresh():
            try:
                fused, laid = self.lay_out()
            except CannotFuse:
                return None
        if not laid.is_intact() or torch.is_autocast_enabled(fused.device.type):
            return None
        found: Computed | None = fused if x is None or x.dtype == fused.dtype else None
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._laid = None  # its weights move one by one: they are concatenated again
        return super()._apply(fn, recurse)


class _Laid:
    """The modules of a layer as they were when its weights were laid out.

    It is checked before every call; for speed all comparisons run in C.
    """

    def __init__(self, layer: nn.Module, parts: Sequence[Any]):
        entries = list(chain.from_iterable(map(_entries, parts)))
        self._tables, self._names, self._objects = _columns(entries)
        tensors = [one for *_, one in entries if isinstance(one, Tensor)]
        tensors += [one for one in parts if isinstance(one, Tensor)]
        self._tensors, self._pointers = tensors, list(map(Tensor.data_ptr, tensors))
        family = [(parent._modules, name, one) for parent in layer.modules() for name, one in parent._modules.items()]
        self._parents, self._childs_names, self._children = _columns([one for one in family if one[2] is not None])
        self._dropouts = [one for one in self._children if isinstance(one, nn.Dropout)]
        self._hooks = [getattr(one, table) for one in self._children for table in HOOKS]
        self._attributes = list(map(vars, self._children))

    def is_fresh(self) -> bool:
        """Whether the layer has the weights that were laid out."""
        same = all(map(is_, map(dict.get, self._tables, self._names), self._objects))
        return same and list(map(Tensor.data_ptr, self._tensors)) == self._pointers

    def is_intact(self) -> bool:
        """Whether its modules are those that were read, without hooks or a replaced forward, and apply no dropout."""
        if not all(map(is_, map(dict.get, self._parents, self._childs_names), self._children)):
            return False
        if any(one.training and one.p for one in self._dropouts):
            return False
        quiet = not any(self._hooks) and not any(map(contains, self._attributes, repeat("forward")))
        if quiet and not is_observed() and not any(map(own_code.may_differ, set(map(type, self._children)))):
            return True
        return not is_observed(*self._children)


def _columns(rows: Sequence[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    first, second, third = list[Any](), list[Any](), list[Any]()
    for row in rows:
        for column, one in zip((first, second, third), row, strict=True):
            column.append(one)
    return first, second, third


def _entries(part: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(table, name, value) of where a linear layer or norm has its weight, and of its epsilon."""
    if isinstance(part, Tensor):
        return
    if hasattr(part, "own_layout"):
        tables = [(vars(part), "source"), (vars(part.weight_owner), "own_layout")]
    else:
        tables = [(part._parameters, name) for name in ("weight", "bias")]
        tables += [(vars(part), name) for name in ("eps", "variance_epsilon")]
    yield from ((table, name, table.get(name)) for table, name in tables)
