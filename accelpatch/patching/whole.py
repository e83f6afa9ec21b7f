"""Modules that are replaced with all that is in them: the sites inside lose their entries, their bytes count there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accelpatch.patching.site import Site

if TYPE_CHECKING:
    from accelpatch.patching.plan import Entry


def absorbed(entries: list[Entry]) -> list[Entry]:
    """The entries without those inside a module that is replaced as a whole, whose bytes count as that one's."""
    whole = {entry.site.path: entry for entry in entries if entry.replacer is not None and entry.replacer.whole}
    parts: dict[str, list[Site]] = {path: [] for path in whole}
    left = []
    for entry in entries:
        parent = next((path for path in whole if entry.site.path.startswith(f"{path}.")), None)
        if parent is None:
            left.append(entry)
        else:
            parts[parent].append(entry.site)
    return [_with(entry, parts[entry.site.path]) if entry.site.path in whole else entry for entry in left]


def _with(entry: Entry, inside: Sequence[Site]) -> Entry:
    every = (entry.site, *inside)
    size, token = sum(site.bytes for site in every), sum(site.token_bytes for site in every)
    return replace(entry, site=replace(entry.site, bytes=size, token_bytes=token), inside=tuple(inside))
