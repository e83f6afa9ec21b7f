"""The marker `each_value`: of a product of parameters, `make test` takes every value of each at least once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest


def chosen(cases: Sequence[tuple[str, ...]]) -> set[int]:
    """Places of cases that together have every value of each parameter; the same ones in every process.

    Each next case has most values that none before had, and of those the values that were taken least.
    """
    missing = {(axis, value) for case in cases for axis, value in enumerate(case)}
    taken: Counter[tuple[int, str]] = Counter()
    left, found = list(range(len(cases))), set[int]()
    while missing:
        values = [set(enumerate(case)) for case in cases]
        best = max(left, key=lambda i: (len(values[i] & missing), -sum(taken[one] for one in values[i]), -i))
        left.remove(best)
        found.add(best)
        missing -= values[best]
        taken.update(values[best])
    return found


def mark(items: Iterable[pytest.Item]) -> None:
    """The other combinations of tests that have the marker become nightly."""
    functions = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        wanted = isinstance(item, pytest.Function) and item.get_closest_marker("each_value")
        if wanted and not item.get_closest_marker("nightly"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for same in functions.values():
        keep = chosen([tuple(map(_key, item.callspec.params.values())) for item in same])
        for place, item in enumerate(same):
            if place not in keep:
                item.add_marker(pytest.mark.nightly)


def _key(value: object) -> str:
    """The identity of a parameter's value in this process."""
    return repr(value) if isinstance(value, str | int | float | tuple | None) else str(id(value))
