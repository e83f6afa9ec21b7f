"""One reversible change to a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from accelpatch.patching.placement import is_offloaded


class Absent:
    """Placeholder for an attribute that did not exist; a class, so that deep copies keep its identity."""


@dataclass(eq=False)
class Change:
    """Sets `owner.name` from `old` to `new`: a child module, `__class__`, or an instance attribute."""

    owner: nn.Module
    name: str
    old: Any
    new: Any

    def apply(self) -> None:
        """Set the new value."""
        _assign(self.owner, self.name, self.new)

    def revert(self) -> None:
        """Set the old value back and close an attribute that was added, if it has `close()`.

        A child that the user put in place of the replacement stays, and a class that the user gave the owner.
        """
        present = type(self.owner) if self.name == "__class__" else self.owner._modules.get(self.name, self.new)
        if present is self.new:
            _assign(self.owner, self.name, self.old)
        if isinstance(self.old, nn.Module):
            give_back(self.old, self.new)
        if self.old is Absent and hasattr(self.new, "close"):
            self.new.close()


@dataclass(eq=False)
class SettingsChange(Change):
    """Sets a configuration to a copy of it. What was set in the copy since stays when the old one is back.

    owner: a module whose instance attribute `name` it is.
    """

    def __post_init__(self) -> None:
        self._before = dict(vars(self.new))

    def revert(self) -> None:
        """Set the old configuration back, with what was set since."""
        if vars(self.owner).get(self.name) is not self.new:  # the user gave it another
            return
        for name, value in vars(self.new).items():
            if name not in self._before or value is not self._before[name]:
                vars(self.old)[name] = value
        super().revert()


def give_back(original: nn.Module, replacement: nn.Module) -> None:
    """Move a weight that only the replacement holds back into the original, unless accelerate offloads that one."""
    if is_offloaded(original):
        return
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
