"""A genetic search for the fastest choice, by pymoo's MixedVariableGA: uniform crossover and mutation of categories, an
elitist survival, and no choice twice.

The search is seeded, so that the same measurements lead to the same generations. One that was interrupted begins anew
and gets the answers that were written down: it goes on where it was.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accelpatch.errors import AccelpatchError

from .space import Choice, Space, key_of

POPULATION = 16
REFUSED = 1e12  # microseconds that a choice which cannot run has for the algorithm
MISSING = "the search needs pymoo, and it cannot be imported ({}): pip install 'accelpatch[tune]'"


@dataclass(frozen=True)
class Outcome:
    """What a choice gave. microseconds: of a call, None where it cannot run, and `reason` says why. failed: the tool
    failed, and not the choice as such, so that a later search asks again."""

    microseconds: float | None
    reason: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Trial:
    """A choice that was measured."""

    choice: Choice
    outcome: Outcome


Measure = Callable[[Choice], Outcome]


def check_installed() -> None:
    """Raise AccelpatchError where the search's library is not here, or one that it needs."""
    try:
        importlib.import_module("pymoo.core.mixed")
    except ImportError as error:
        raise AccelpatchError(MISSING.format(error)) from error


def search(
    space: Space, measure: Measure, *, trials: int, seed: int = 0, first: Choice | None = None,
    known: Mapping[str, Outcome] | None = None, population: int = POPULATION,
) -> list[Trial]:  # fmt: skip
    """Measure up to so many choices of a space, each once, in the order of the search.

    first: a choice to begin with, such as what is used today; left out where it is none of the space. known: outcomes
    of an earlier call, by `key_of`; they are not measured again, and count as trials. Raises AccelpatchError without
    pymoo.
    """
    check_installed()
    found: dict[str, Trial] = {}
    most = min(trials, space.size)

    def asked(places: Mapping[str, Any]) -> float:
        choice = space.choice({name: int(place) for name, place in places.items()})
        key = key_of(choice)
        if key not in found:
            if len(found) == most:
                return REFUSED
            found[key] = Trial(choice, (known or {}).get(key) or measure(choice))
        value = found[key].outcome.microseconds
        return REFUSED if value is None else value

    start = space.places(first) if first is not None else None
    if start is not None or not space.free:
        asked(start or {})
    if space.free and most > len(found):
        _generations(space, asked, lambda: len(found) == most, seed, min(population, most))
    return list(found.values())


def best_of(trials: list[Trial]) -> Trial | None:
    """The fastest; None where none could run."""
    ran = [one for one in trials if one.outcome.microseconds is not None]
    return min(ran, key=lambda one: one.outcome.microseconds or 0.0, default=None)


def _generations(
    space: Space, asked: Callable[[Mapping[str, Any]], float], ended: Callable[[], bool], seed: int, population: int
) -> None:
    """Breed until the search has ended, or the algorithm finds nothing new."""
    from pymoo.core.mixed import MixedVariableGA
    from pymoo.core.problem import ElementwiseProblem
    from pymoo.core.variable import Choice as Variable
    from pymoo.termination.max_gen import MaximumGenerationTermination

    class Asked(ElementwiseProblem):
        def _evaluate(self, x: Mapping[str, Any], out: dict[str, float], *rest: Any, **others: Any) -> None:
            out["F"] = asked(x)

    variables = {name: Variable(options=list(range(len(values)))) for name, values in space.free.items()}
    algorithm = MixedVariableGA(pop_size=population)
    endless = MaximumGenerationTermination(1 << 30)
    algorithm.setup(Asked(vars=variables, n_obj=1), termination=endless, seed=seed, verbose=False)
    while not ended() and algorithm.has_next():
        algorithm.next()
