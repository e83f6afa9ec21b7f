"""tests/support/each_value.py: no value of a parameter is left out, and as few cases as that allows are taken."""

from __future__ import annotations

import itertools

import pytest

from tests.support.each_value import chosen

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("sizes", [(3,), (4, 3), (5, 5), (2, 3, 4), (30, 3, 2)])
def test_every_value_is_taken_by_the_fewest_cases_of_a_product(sizes: tuple[int, ...]) -> None:
    cases = list(itertools.product(*([str(value) for value in range(size)] for size in sizes)))
    taken = [cases[place] for place in chosen(cases)]
    assert len(taken) == max(sizes)
    for axis, size in enumerate(sizes):
        count = [sum(case[axis] == str(value) for case in taken) for value in range(size)]
        assert min(count) >= 1
        assert max(count) - min(count) <= 2


def test_cases_of_no_product_are_all_taken() -> None:
    cases = [("a", "1"), ("b", "1"), ("c", "2")]
    assert chosen(cases) == {0, 1, 2}


def test_the_others_are_nightly(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\nfrom tests.support import each_value\n\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n    each_value.mark(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n\n"
        "@pytest.mark.each_value\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "@pytest.mark.parametrize('b', ['x', 'y'])\n"
        "def test_it(a, b): pass\n\n"
        "def test_other(): pass\n"
    )
    done = pytester.runpytest_inprocess("-m", "not nightly", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=4, deselected=3)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=7)
