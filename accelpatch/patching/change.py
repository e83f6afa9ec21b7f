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
        """Restore the old value, and close an attribute that was added, if it has `close()`.

        If the user has since replaced the child or the class by something else, theirs stays.
        """
        current = type(self.owner) if self.name == "__class__" else self.owner._modules.get(self.name, self.new)
        if current is self.new:
            _assign(self.owner, self.name, self.old)
        if isinstance(self.old, nn.Module):
            give_back(self.old, self.new)
        if self.old is Absent and hasattr(self.new, "close"):
            self.new.close()


@dataclass(eq=False)
class SettingsChange(Change):
    """Replaces a configuration by a modified copy. `revert` carries what the user set in the copy over to the original.

    owner: the module that has the configuration as its instance attribute `name`.
    """

    def __post_init__(self) -> None:
        self._at_patch = dict(vars(self.new))

    def revert(self) -> None:
        """Restore the old configuration, with what was set since."""
        if vars(self.owner).get(self.name) is not self.new:  # the user has set another one
            return
        for name, value in vars(self.new).items():
            if name not in self._at_patch or value is not self._at_patch[name]:
                vars(self.old)[name] = value
        super().revert()


def give_back(original: nn.Module, replacement: nn.Module) -> None:
    """Move a weight that only the replacement has back into the original, unless accelerate offloads the original."""
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
