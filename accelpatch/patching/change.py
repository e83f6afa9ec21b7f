"""One step of a patch and its way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn


class Absent:
    """Stands for an attribute that was not there; a class, so that it is itself in a deep copy too."""


@dataclass(eq=False)
class Change:
    """`owner.name` from `old` to `new`: a child module, a class, or an attribute of the instance."""

    owner: nn.Module
    name: str
    old: Any
    new: Any

    def apply(self) -> None:
        """Put the new value in."""
        _assign(self.owner, self.name, self.new)

    def revert(self) -> None:
        """Put the old value back; an attribute that only a patched model has is closed, if it can be.

        A child that the user has put in its place since stays.
        """
        if self.owner._modules.get(self.name, self.new) is self.new:
            _assign(self.owner, self.name, self.old)
        if isinstance(self.old, nn.Module):
            give_back(self.old, self.new)
        if self.old is Absent and hasattr(self.new, "close"):
            self.new.close()


def give_back(original: nn.Module, replacement: nn.Module) -> None:
    """Let an original have a weight that only its replacement holds."""
    if hasattr(replacement, "give_back"):
        cast(Any, replacement).give_back(original)


def _assign(owner: nn.Module, name: str, value: Any) -> None:
    if name in owner._modules:
        owner._modules[name] = value
    elif name == "__class__":
        owner.__class__ = value
    elif value is Absent:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value
