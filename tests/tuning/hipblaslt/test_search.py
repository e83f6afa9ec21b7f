"""The genetic search: it finds the best of a known table, is the same again, and goes on where it was."""

from __future__ import annotations

import itertools
import sys

import pytest

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.hipblaslt import configuration, search, simulated
from accelpatch.tuning.hipblaslt.gemms import Gemm
from accelpatch.tuning.hipblaslt.search import Outcome
from accelpatch.tuning.hipblaslt.space import Choice, Space, key_of

ARCH = "gfx942"


def _gemm(m: int, n: int, k: int) -> Gemm:
    return Gemm("T", "N", m, n, k, 1, *["bf16_r"] * 4, "f32_r", (k, k, m, m))  # type: ignore[arg-type]


def _small(gemm: Gemm) -> Space:
    """A part of a GEMM's choices that can be measured whole."""
    values = dict(configuration.space_of(gemm, ARCH).values)
    instructions = values["MatrixInstruction"]
    values["MatrixInstruction"] = instructions[:: len(instructions) // 12][:12]
    return Space(values | {"TransposeLDS": (1,), "SourceSwap": (1,), "StaggerU": (32,), "WorkGroupMapping": (1, 8)})


def _measured(gemm: Gemm, choice: Choice) -> Outcome:
    reason = simulated.why_not(gemm, choice, ARCH)
    return Outcome(None, reason) if reason else Outcome(simulated.microseconds(gemm, choice, ARCH))


def _all(space: Space) -> list[Choice]:
    free = space.free
    return [space.choice(dict(zip(free, places, strict=True)))
            for places in itertools.product(*(range(len(values)) for values in free.values()))]  # fmt: skip


@pytest.mark.parametrize("gemm", [_gemm(12288, 64, 4096), _gemm(4096, 64, 11008)], ids=["qkv", "down"])
def test_within_2_percent_of_an_exhaustive_sweep_in_a_quarter_of_the_trials(gemm: Gemm) -> None:
    space = _small(gemm)
    table = {key_of(one): _measured(gemm, one) for one in _all(space)}
    assert len(table) >= 500
    best = min(one.microseconds for one in table.values() if one.microseconds)
    for seed in range(3):
        trials = search.search(space, lambda one: table[key_of(one)], trials=len(table) // 4, seed=seed)
        found = search.best_of(trials)
        assert found is not None
        assert (found.outcome.microseconds or 0) <= 1.02 * best
        assert len({key_of(one.choice) for one in trials}) == len(trials) == len(table) // 4


def test_it_is_the_same_again_and_goes_on_with_what_is_known() -> None:
    gemm = _gemm(4096, 64, 11008)
    space = _small(gemm)
    whole = search.search(space, lambda one: _measured(gemm, one), trials=60, seed=3)
    known = {key_of(one.choice): one.outcome for one in whole[:37]}
    asked: list[str] = []

    def measure(choice: Choice) -> Outcome:
        asked.append(key_of(choice))
        return _measured(gemm, choice)

    again = search.search(space, measure, trials=60, seed=3, known=known)
    assert again == whole
    assert asked == [key_of(one.choice) for one in whole[37:]]


def test_it_begins_with_what_is_used_today() -> None:
    space = Space({"A": (1, 2, 3), "B": (1, 2, 3), "C": (0,)})
    first = {"A": 3, "B": 2, "C": 0}
    made = search.search(space, lambda one: Outcome(float(sum(map(int, one.values())))), trials=5, first=first)  # type: ignore[arg-type]
    assert made[0].choice == first
    elsewhere = search.search(space, lambda one: Outcome(1.0), trials=5, first={"A": 9})
    assert len(elsewhere) == 5


@pytest.mark.parametrize(("values", "count"), [((1,), 1), ((1, 2, 3), 3)], ids=["one choice", "few choices"])
def test_small_spaces_are_measured_whole(values: tuple[int, ...], count: int) -> None:
    made = search.search(Space({"A": values}), lambda one: Outcome(1.0), trials=50)
    assert len(made) == count


def test_where_nothing_runs_there_is_no_best() -> None:
    made = search.search(Space({"A": (1, 2, 3)}), lambda one: Outcome(None, "no"), trials=3)
    assert search.best_of(made) is None


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymoo.core.mixed", None)  # as without pymoo, or a package that it needs
    with pytest.raises(AccelpatchError, match=r"pip install 'accelpatch\[tune\]'"):
        search.search(Space({"A": (1, 2)}), lambda one: Outcome(1.0), trials=2)
