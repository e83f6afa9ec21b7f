"""What a search chooses from: the values of each parameter, as a tuning configuration lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = int | float | bool | str | tuple[int, ...]
Choice = Mapping[str, Value]  # one value of each parameter


@dataclass(frozen=True)
class Space:
    """values: of each parameter, in the configuration's order."""

    values: Mapping[str, tuple[Value, ...]]

    @property
    def free(self) -> dict[str, tuple[Value, ...]]:
        """The parameters that have more than one value."""
        return {name: values for name, values in self.values.items() if len(values) > 1}

    @property
    def size(self) -> int:
        """The number of choices."""
        total = 1
        for values in self.values.values():
            total *= len(values)
        return total

    def choice(self, places: Mapping[str, int]) -> dict[str, Value]:
        """The choice with these places in the lists of values; 0 where none is given."""
        return {name: values[places.get(name, 0)] for name, values in self.values.items()}

    def places(self, choice: Choice) -> dict[str, int] | None:
        """The places of a choice's values, of the free parameters; None where one of its values is not listed."""
        try:
            return {name: values.index(choice[name]) for name, values in self.free.items()}
        except (KeyError, ValueError):
            return None


def key_of(choice: Choice) -> str:
    """A choice as one line of text, the same for the same choice."""
    return json.dumps({name: choice[name] for name in sorted(choice)}, separators=(",", ":"))


def from_fork(entries: Any) -> Space:
    """The space of a configuration's ForkParameters, a list of one-entry mappings to lists.

    Raises ValueError for anything else.
    """
    if not isinstance(entries, list) or not entries:
        raise ValueError("ForkParameters is no list")
    values: dict[str, tuple[Value, ...]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ValueError(f"{entry!r:.60} in ForkParameters is not one parameter with its values")
        ((name, listed),) = entry.items()
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"{name!s:.40} has no list of values")
        values[str(name)] = tuple(_value(one, str(name)) for one in listed)
    return Space(values)


def to_fork(space: Space) -> list[dict[str, list[Any]]]:
    """The ForkParameters of a space."""
    return [
        {name: [list(one) if isinstance(one, tuple) else one for one in values]}
        for name, values in space.values.items()
    ]


def _value(one: Any, name: str) -> Value:
    if isinstance(one, list) and all(isinstance(part, int) for part in one):
        return tuple(one)
    if isinstance(one, bool | int | float | str):
        return one
    raise ValueError(f"{name:.40} has the value {one!r:.40}, neither a number, a word nor a list of integers")
