"""Anything at all goes into the reader: a Recipe or a RecipeError comes out, soon, and nothing else."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accelpatch.errors import RecipeError
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Match, Recipe
from accelpatch.recipe.yaml import MAX_BYTES, Node, read

GOOD = """\
name: good
extends: int8
rules:
  - name: linear
    options: {group_size: [128, 64], note: "a\\tb"}
  - match: {role: [q_proj, fc1], class: Conv1D, name: ["*.h.*", 'x'], shape: {min_n: 1, max_k: 2}}
    replace: int4_weight_only
    otherwise: error  # why
    optional: true
runtime: {cache: stock, graph: off, max_length: null, speculate: off}
verify: {metric: cosine, bound: 1e-2, bounds: {linear: 0.5}}
calibrate: {samples: 4}
"""
PIECES = [*"[]{}:,-?&*!|>'\"%@`#~ \n\t\\", ": ", "- ", "---\n", "...\n", "<<: ", "!!python/object:a.b ", "&a ", "*a",
          "? ", "\\UFFFFFFFF", "\\x1b", "%YAML 9.9\n", ".nan", "1e999", "rules", "match", "\ufeff", "\u2028", "\x00",
          "\ud800", "9" * 50, "[" * 40, "name: "]  # fmt: skip

settings.register_profile("recipes", max_examples=150, deadline=5_000, derandomize=True)
FUZZ = settings(settings.get_profile("recipes"))


def _read(text: str) -> Recipe | RecipeError:
    start = time.perf_counter()
    try:
        result: Recipe | RecipeError = recipes.parse(text)
    except RecipeError as error:
        result = error
    assert time.perf_counter() - start < 5
    return result


@FUZZ
@given(st.binary(max_size=2_000))
@example(b"\xff\xfe" + "rules: []".encode("utf-16-le"))
@example(b"\xef\xbb\xbfrules: []")
def test_random_bytes(data: bytes) -> None:
    with contextlib.suppress(RecipeError):
        assert isinstance(read(data, "fuzz"), Node)


@FUZZ
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_random_yaml_punctuation(text: str) -> None:
    # No run of these makes a whole recipe, so anything but an error would be a reader that is too kind.
    assert isinstance(_read(text), RecipeError)


@st.composite
def _mutated(draw: st.DrawFn) -> str:
    text = GOOD
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(start + 12, len(text))))
        text = text[:start] + draw(st.sampled_from(["", *PIECES]) | st.text(max_size=3)) + text[stop:]
    return text


@settings(FUZZ, max_examples=400)
@given(_mutated())
@example(GOOD)
def test_mutations_of_a_good_recipe(text: str) -> None:
    result = _read(text)
    if isinstance(result, Recipe):
        assert recipes.parse(recipes.dump(result)) == result


def test_the_recipe_that_is_mutated_is_good() -> None:
    assert isinstance(_read(GOOD), Recipe)


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\ufffe\uffff"), max_size=8)
    | st.sampled_from(["1", "1e3", ".5", "010", "true", "~", "", "off", "-", "*a", "a: b", "#", " x ", "a\nb\n", "<<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "true", "1"]), inner, max_size=2),
    max_leaves=6,
)


@FUZZ
@given(_PLAIN)
@example("1e3")  # text for PyYAML, a number for the reader
@example("010")
@example(["off", "~", ".nan", "9" * 50])
def test_dump_round_trips_any_option(value: object) -> None:
    rule = recipes.Rule(Match(name=("*",)), "one", {"x": value, "y": value})
    recipe = Recipe(name="a", description="b", rules=(rule,))
    assert recipes.parse(recipes.dump(recipe)) == recipe


@FUZZ
@given(st.text(max_size=200), st.text(max_size=200))
@pytest.mark.filterwarnings("error")
def test_fits_name_takes_any_pattern(pattern: str, name: str) -> None:
    assert Match(name=(pattern,)).fits_name(name) in (True, False)


@pytest.mark.parametrize("piece", [pytest.param(piece, id=repr(piece[:8])) for piece in PIECES])
def test_the_largest_file_of_one_piece_is_read_in_time(piece: str) -> None:
    for start in ("", "rules: ", "rules:\n  - ", 'rules: ["'):
        assert isinstance(_read((start + piece * MAX_BYTES)[:MAX_BYTES]), RecipeError)
