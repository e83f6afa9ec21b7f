"""Recipes that are right: what they mean, how they extend each other, and that dump gives back what load read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from accelpatch.errors import RecipeError
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Match, Recipe, Rule, Runtime, Verify
from accelpatch.recipe.schema import READERS, ROLES

ROOT = Path(__file__).parents[2]

WHOLE = """\
name: whole
description: Every key once.
rules:
  - name: wide
    match:
      role: [q_proj, k_proj]
      class: Linear
      name: ["model.layers.*", "*.h.?"]
      shape: {min_n: 64, max_k: 4096}
    replace: int8_weight_only
    options: {group_size: [128, 64], nested: {note: "1e-3", ratio: 1e-3}}
    otherwise: error
    optional: true
  - match: {role: other}
    replace: keep
runtime: {cache: stock, graph: off, max_length: 4096, speculate: prompt_lookup}
verify: {metric: cosine, bound: 1e-2, on_failure: error, bounds: {wide: 0}}
calibrate: {samples: 16, length: 512}
"""


def test_every_key_means_what_it_says() -> None:
    assert recipes.parse(WHOLE) == Recipe(
        name="whole",
        description="Every key once.",
        rules=(
            Rule(
                match=Match(
                    role=("q_proj", "k_proj"),
                    cls=("Linear",),
                    name=("model.layers.*", "*.h.?"),
                    shape={"min_n": 64, "max_k": 4096},
                ),
                replace="int8_weight_only",
                options={"group_size": [128, 64], "nested": {"note": "1e-3", "ratio": 0.001}},
                otherwise="error",
                optional=True,
                name="wide",
            ),
            Rule(match=Match(role=("other",)), replace="keep"),
        ),
        runtime=Runtime(cache="stock", graph="off", max_length=4096, speculate="prompt_lookup"),
        verify=Verify(metric="cosine", bound=0.01, on_failure="error", bounds={"wide": 0.0}),
        calibrate={"samples": 16, "length": 512},
    )


def test_dump_gives_back_every_key() -> None:
    assert recipes.parse(recipes.dump(recipes.parse(WHOLE))) == recipes.parse(WHOLE)


def test_the_shortest_recipe_has_the_defaults() -> None:
    recipe = recipes.parse("rules: [{match: {name: '*'}, replace: keep}]", source="folder/mine.yaml")
    assert (recipe.name, recipe.description, recipe.calibrate) == ("mine", "", None)
    assert (recipe.runtime, recipe.verify) == (Runtime(), Verify())
    assert recipe.rules == (Rule(match=Match(name=("*",)), replace="keep"),)


def test_a_rule_knows_its_place_and_equality_does_not_ask_for_it() -> None:
    first, second = recipes.parse(WHOLE, source="a.yaml"), recipes.parse("\n" + WHOLE, source="b.yaml")
    assert first.rules[0].place == "a.yaml:4:5"
    assert second.rules[1].place == "b.yaml:15:5"
    assert first == second


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("1e-3", 0.001, id="exponent without a dot"),
        pytest.param("-2", -2, id="negative"),
        pytest.param("off", "off", id="off is a word"),
        pytest.param("1:30", "1:30", id="no sexagesimal"),
        pytest.param("010", "010", id="no octal"),
        pytest.param("2024-01-01", "2024-01-01", id="no dates"),
        pytest.param("~", None, id="null"),
        pytest.param("'1'", "1", id="quoted number is text"),
        pytest.param("True", True, id="true"),
        pytest.param("=", "=", id="no value tag"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    recipe = recipes.parse(f"rules: [{{match: {{name: '*'}}, replace: a, options: {{x: {text}}}}}]")
    assert recipe.rules[0].options == {"x": value}
    assert type(recipe.rules[0].options["x"]) is type(value)
    assert recipes.parse(recipes.dump(recipe)) == recipe


# --- extends


def _load(folder: Path, **files: str) -> Recipe:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return recipes.load(folder / f"{next(reversed(files))}.yaml")


BASE = """\
description: the base
rules:
  - {name: a, match: {role: q_proj}, replace: one, options: {x: 1, y: 2}, optional: true}
  - {name: b, match: {role: k_proj}, replace: two, options: {z: 3}}
  - {match: {role: other}, replace: keep}
runtime: {cache: stock, max_length: 64}
verify: {bound: 0.1, bounds: {a: 0.2, b: 0.3}}
calibrate: {samples: 8}
"""


def test_extends_overrides_by_rule_name_and_puts_new_rules_first(tmp_path: Path) -> None:
    child = """\
extends: ./base.yaml
rules:
  - {name: b, match: {role: v_proj}, otherwise: error}
  - {name: new, match: {role: head}, replace: one}
  - {name: a, options: {y: null, w: 4}}
  - {match: {class: Conv1D}, replace: two}
"""
    rules = _load(tmp_path, base=BASE, child=child).rules
    assert rules == (
        Rule(Match(role=("head",)), "one", name="new"),
        Rule(Match(cls=("Conv1D",)), "two"),
        Rule(Match(role=("q_proj",)), "one", {"x": 1, "y": None, "w": 4}, optional=True, name="a"),
        Rule(Match(role=("v_proj",)), "two", {"z": 3}, otherwise="error", name="b"),
        Rule(Match(role=("other",)), "keep"),
    )
    assert [rule.place.rpartition("/")[2] for rule in rules[2:]] == [
        "child.yaml:5:5",
        "child.yaml:3:5",
        "base.yaml:5:5",
    ]


def test_another_replacer_does_not_inherit_options(tmp_path: Path) -> None:
    child = "extends: ./base.yaml\nrules: [{name: a, replace: two}, {name: b, replace: keep}]"
    rules = _load(tmp_path, base=BASE, child=child).rules
    assert [(rule.replace, rule.options) for rule in rules[:2]] == [("two", {}), ("keep", {})]


def test_extends_merges_the_rest_key_by_key(tmp_path: Path) -> None:
    child = "extends: ./base.yaml\nruntime: {cache: auto}\nverify: {on_failure: error, bounds: {b: 1}}"
    recipe = _load(tmp_path, base=BASE, child=child)
    assert (recipe.name, recipe.description) == ("child", "")
    assert recipe.runtime == Runtime(cache="auto", max_length=64)
    assert recipe.verify == Verify(bound=0.1, on_failure="error", bounds={"a": 0.2, "b": 1.0})
    assert recipe.calibrate == {"samples": 8}
    without = _load(tmp_path, base=BASE, child="extends: ./base.yaml\ncalibrate: null\nruntime: {max_length: null}")
    assert (without.calibrate, without.runtime.max_length) == (None, None)


def test_extends_a_bundled_recipe_and_chains(tmp_path: Path) -> None:
    recipe = _load(
        tmp_path,
        middle="extends: int8\nrules: [{name: linear, options: {group_size: 64}}]",
        child="extends: middle.yaml\nrules: [{name: head, replace: keep}]",
    )
    by_name = {rule.name: rule for rule in recipe.rules}
    assert by_name["linear"].options == {"group_size": 64}
    assert by_name["head"].replace == "keep"
    assert by_name["norm"] == recipes.load("exact").rules[1]
    assert recipes.parse("extends: int8").rules == recipes.load("int8").rules


def test_a_path_in_extends_is_relative_to_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "inner" / "child.yml").write_text("extends: ../base.yaml")
    monkeypatch.chdir(tmp_path)
    assert len(recipes.load("inner/child.yml").rules) == len(recipes.load("base.yaml").rules) == 3


# --- names


@pytest.mark.parametrize(
    ("patterns", "name", "fits"),
    [
        pytest.param((), "anything", True, id="none given"),
        pytest.param(("model.*.q_proj",), "model.layers.0.self_attn.q_proj", True, id="star crosses dots"),
        pytest.param(("q_proj",), "model.q_proj", False, id="the whole name"),
        pytest.param(("a", "*.1?.*"), "h.12.mlp", True, id="any of them"),
        pytest.param(("*.[0-3].*",), "h.4.mlp", False, id="set"),
        pytest.param(("Model.*",), "model.a", False, id="case"),
        pytest.param((".*",), "model", False, id="no regular expression"),
    ],
)
def test_fits_name(patterns: tuple[str, ...], name: str, fits: bool) -> None:
    assert Match(name=patterns).fits_name(name) is fits


# --- the documentation


def _documented() -> list[tuple[int, str]]:
    text = (ROOT / "docs" / "recipes.md").read_text()
    return [(text[: m.start()].count("\n") + 2, m[1]) for m in re.finditer(r"^```yaml\n(.*?)^```", text, re.M | re.S)]


@pytest.mark.parametrize("example", [pytest.param(text, id=f"line {line}") for line, text in _documented()])
def test_every_example_in_the_documentation_is_a_recipe(example: str) -> None:
    recipe = recipes.parse(example, source="docs/recipes.md")
    assert recipes.parse(recipes.dump(recipe)) == recipe


def test_the_documentation_names_every_key_role_and_bundled_recipe() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    words = [*(key for keys in READERS.values() for key in keys), *ROLES, *recipes.bundled()]
    assert len(READERS) == 7
    assert [word for word in words if f"`{word}`" not in text] == []


def test_an_error_in_the_documentation_is_what_the_reader_says() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    with pytest.raises(RecipeError) as caught:
        recipes.parse("extends: int8\nrules:\n  - name: linear\n    optoins: {group_size: 64}\n", source="mine.yaml")
    assert str(caught.value) in text


def test_the_documented_programs_give_recipes_in_forms_that_are_taken() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    calls = [node for one in programs for node in ast.walk(ast.parse(one)) if isinstance(node, ast.Call)]
    given = [node.args[1] for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "patch"]
    assert [type(one).__name__ for one in given] == ["Constant", "Constant", "Dict", "Name"]
    assert recipes.load(ast.literal_eval(given[2])).rules[0].replace == "keep"
