"""One swap of a patch and its way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from accelpatch.patching.match import is_adapter


class Absent:
    """Stands for an attribute that was not there; a class, so that it is itself in a deep copy too."""


@dataclass(eq=False)
class Change:
    """`owner.name` from `old` to `new`: a child module, the class of the model, or an attribute of the instance.

    shared: names of the parameters and buffers that an original and its replacement hold together.
    """

    owner: nn.Module
    name: str
    old: Any
    new: Any
    shared: frozenset[str] = frozenset()

    def apply(self) -> None:
        """Put the new value in."""
        _assign(self.owner, self.name, self.new)

    def revert(self) -> None:
        """Put the old value back; an attribute that only a patched model has is closed, if it can be.

        An adapter that has come around the new module since stays.
        """
        current = self.owner._modules.get(self.name)
        if current is None or not is_adapter(current) or current is self.new:
            _assign(self.owner, self.name, self.old)
        give_back(self)
        if self.old is Absent and hasattr(self.new, "close"):
            self.new.close()


def give_back(change: Change) -> None:
    """Let an original have a weight that only its replacement holds."""
    if isinstance(change.old, nn.Module) and hasattr(change.new, "give_back"):
        change.new.give_back(change.old)


def _assign(owner: nn.Module, name: str, value: Any) -> None:
    if name in owner._modules:
        owner._modules[name] = value
    elif name == "__class__":
        owner.__class__ = value
    elif value is Absent:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value
