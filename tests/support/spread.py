"""Products of cases of which `make test` runs a part, and `make test-all` the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest


def spread(names: str, *values: Iterable[Any]) -> Callable[[Any], Any]:
    """Parametrizes `names` by every combination of `values`; a mapping's keys are the ids of its values.

    Every combination of all but the last list runs with one value of the last list, chosen in turn; with the others it
    repeats what those show, and is nightly.
    """
    lists = [
        list(one.items() if isinstance(one, Mapping) else ((str(value), value) for value in one)) for one in values
    ]
    cases = []
    for places in itertools.product(*(range(len(one)) for one in lists)):
        chosen = sum(places[:-1]) % len(lists[-1]) == places[-1]
        ids, case = zip(*(one[place] for one, place in zip(lists, places, strict=True)), strict=True)
        cases.append(pytest.param(*case, id="-".join(ids), marks=() if chosen else pytest.mark.nightly))
    return pytest.mark.parametrize(names, cases)
