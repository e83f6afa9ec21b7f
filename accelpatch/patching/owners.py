"""Each parameter has one owner: a replaced module that takes all that is in it leaves nothing to other rules."""

from __future__ import annotations

from collections.abc import Iterator

from accelpatch.errors import PlanError
from accelpatch.patching.entry import Entry


def check_owners(entries: list[Entry]) -> None:
    """Raise PlanError where a replaced parent and a child's replacement would own the same weight."""
    replaced = [(entry, entry.replacer) for entry in entries if entry.replacer is not None]
    owners = {place: (other.site.path, by) for other, by in replaced for place in other.site.places}
    for entry, replacer in replaced:
        for place in (place for path in entry.site.paths for place in _around(path)):
            path, owner = owners.get(place, ("", None))
            if owner is not None and not owner.consumes & (entry.site.roles | {"*"}):
                raise PlanError(
                    f"two owners of one parameter: {owner.name} takes {path} with all that is in it, and "
                    f"{replacer.name} takes {entry.site.path}; drop one of the two rules"
                )


def _around(path: str) -> Iterator[str]:
    """The dotted paths of the modules that a module lies in."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
