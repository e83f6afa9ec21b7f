"""Chooses a plan's smoothing groups: a norm or linear layer, and all linear layers that read its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from accelpatch import own_code
from accelpatch.errors import PlanError
from accelpatch.patching.site import LINEAR_ROLES, Site

NONE: Mapping[str, str] = MappingProxyType({})


class Group(Protocol):
    """Modules that are smoothed together, all or none.

    source: path of the module whose output channels are divided. consumers: paths of all modules that read them.
    kind: a label that is the same in every layer, such as "input_layernorm -> q_proj, k_proj, v_proj".
    """

    @property
    def source(self) -> str: ...

    @property
    def consumers(self) -> tuple[str, ...]: ...

    @property
    def kind(self) -> str: ...


def chosen(
    groups: Sequence[Group], smooths: Mapping[str, bool], hooked: Collection[str] = (),
    stored: Mapping[str, str] = NONE,
) -> tuple[tuple[Group, ...], list[str]]:  # fmt: skip
    """The groups that are smoothed, and notes about those that cannot be.

    smooths: path of each replaced site -> whether its replacement can be smoothed. hooked: paths of modules with user
    hooks, which would see divided values. stored: see `not_multiplied`. Raises PlanError for a group in which only some
    consumers can be smoothed, and for one in which an adapter wraps a consumer and reads the same input.
    """
    found, skipped = list[Group](), Counter[str]()
    for group in groups:
        inside = [place for path in group.consumers for place in smooths if place.startswith(f"{path}.")]
        able = [path for path in group.consumers if smooths.get(path, False)]
        if not inside and not able:
            continue
        if why := next((stored[path] for path in group.consumers if path in stored), None):
            skipped[f"{group.kind}, of which a weight {why}"] += 1
            continue
        if inside:
            raise PlanError(
                f"{inside[0].rpartition('.')[0]} cannot be smoothed, for an adapter around it reads the same input: "
                "merge the adapter first, or switch smoothing off (calibrate: {alpha: null})"
            )
        if missing := [path for path in group.consumers if path not in able]:
            raise PlanError(
                f"{missing[0]} cannot be smoothed, and {able[0]} reads the same input of {group.source}: give both one "
                "rule, or switch smoothing off (calibrate: {alpha: null})"
            )
        if not smooths.get(group.source, False):
            skipped[f"{group.kind}, whose source stays"] += 1
        elif any(path in hooked for path in (group.source, *group.consumers)):
            skipped[f"{group.kind}, where a hook sees what would be divided"] += 1
        else:
            found.append(group)
    return tuple(found), [f"not smoothed: {what} ({count} times)" for what, count in skipped.items()]


def not_multiplied(sites: Iterable[Site]) -> dict[str, str]:
    """Path of each site whose weight smoothing cannot multiply -> why."""
    found = {}
    for site in sites:
        weight = None if site.module is None else site.module._parameters.get("weight")
        if site.stored is not None:
            found[site.path] = "is quantised already"
        elif weight is not None and (what := own_code.unusual(weight)) is not None:
            found[site.path] = f"is {what}"
        elif site.n is None and site.role in LINEAR_ROLES:
            found[site.path] = "is no linear layer's"  # such as a module of two linear layers
    return found


def lines(groups: Sequence[Group]) -> list[str]:
    """A line for each kind of group."""
    counts = Counter(group.kind for group in groups)
    return [f"smoothed together: {kind}" + f" ({count} times)" * (count > 1) for kind, count in counts.items()]


def with_groups(failed: Mapping[str, str], groups: Sequence[Group]) -> dict[str, str]:
    """The failed sites and all sites smoothed with them, directly or through other groups: path -> why it stays."""
    causes, more = {path: path for path in failed}, True  # path -> the failed site that it stays for
    while more:
        more = False
        for group in groups:
            paths = (group.source, *group.consumers)
            first = next((path for path in paths if path in causes), None)
            if first is not None and (others := [path for path in paths if path not in causes]):
                causes |= dict.fromkeys(others, causes[first])
                more = True
    return {
        path: failed.get(path, f"it is smoothed together with {cause}, which stays") for path, cause in causes.items()
    }
