"""Recipes that are wrong: each is refused with its place, quickly, and with words that help."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from accelpatch.errors import RecipeError
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Match
from accelpatch.recipe.schema import MAX_PATTERN, MAX_STARS
from accelpatch.recipe.yaml import MAX_BYTES, MAX_DEPTH

RULE = "rules: [{match: {name: '*'}, replace: keep}]\n"


def _rule(text: str) -> str:
    return f"rules:\n  - {text}\n"


def _refused(text: str) -> RecipeError:
    start = time.perf_counter()
    with pytest.raises(RecipeError) as caught:
        recipes.parse(text, source="r")
    assert time.perf_counter() - start < 5
    return caught.value


BAD = {
    "empty": ("", None, "the file is empty"),
    "only comments": ("# nothing\n\n", None, "the file is empty"),
    "not a mapping": ("- a\n", (1, 1), "a recipe must be a mapping, not a list"),
    "text": ("hello", (1, 1), "a recipe must be a mapping, not 'hello' (text)"),
    "two documents": (RULE + "---\n" + RULE, (2, 1), "expected a single document"),
    "syntax": ("rules: [\n", (2, 1), "expected the node content"),
    "tab": ("rules:\n\t- a\n", (2, 1), "cannot start any token"),
    "no rules": ("name: a\n", (1, 1), "needs the key 'rules', or 'extends'"),
    "rules empty": ("rules: []\n", (1, 1), "at least one rule"),
    "rules a mapping": ("rules: {a: b}\n", (1, 8), "rules must be a list, not a mapping"),
    "rules nothing": ("rules:\n", (1, 7), "rules must be a list, not nothing"),
    "unknown key": ("rulse: []\n", (1, 1), "unknown key 'rulse' in a recipe; did you mean 'rules'?"),
    "unknown key far off": (RULE + "qqq: 1\n", (2, 1), "unknown key 'qqq' in a recipe; known: name, description,"),
    "unknown key in a rule": (_rule("{match: {name: a}, replcae: keep}"), (2, 24), "did you mean 'replace'?"),
    "unknown key in match": (_rule("{match: {rol: head}, replace: keep}"), (2, 14), "did you mean 'role'?"),
    "unknown key in shape": (_rule("{match: {shape: {min_m: 1}}, replace: a}"), (2, 22), "did you mean 'min_"),
    "unknown key in verify": (RULE + "verify: {bond: 1}\n", (2, 10), "did you mean 'bound'?"),
    "unknown key in runtime": (RULE + "runtime: {graf: auto}\n", (2, 11), "did you mean 'graph'?"),
    "alpha below zero": (RULE + "calibrate: {alpha: -0.1}\n", (2, 20), "alpha must be at least 0, not -0.1"),
    "alpha above one": (RULE + "calibrate: {alpha: 1.5}\n", (2, 20), "alpha is 1.5, and it is from 0 to 1"),
    "alpha nan": (RULE + "calibrate: {alpha: .nan}\n", (2, 20), "must be finite"),
    "alpha infinite": (RULE + "calibrate: {alpha: .inf}\n", (2, 20), "must be finite"),
    "alpha text": (RULE + "calibrate: {alpha: much}\n", (2, 20), "alpha"),
    "alpha true": (RULE + "calibrate: {alpha: true}\n", (2, 20), "alpha"),
    "alpha a list": (RULE + "calibrate: {alpha: [0.5]}\n", (2, 20), "alpha"),
    "samples zero": (RULE + "calibrate: {samples: 0}\n", (2, 22), "samples"),
    "unknown key in calibrate": (RULE + "calibrate: {sample: 1}\n", (2, 13), "did you mean 'samples'?"),
    "duplicate key": (RULE + RULE, (2, 1), "duplicate key 'rules'; it stands first in line 1"),
    "duplicate option": (_rule("{match: {name: a}, replace: a, options: {x: 1, x: 1}}"), (2, 52), "duplicate key 'x'"),
    "key a number": ("1: 2\n", (1, 1), "a key must be text, not 1 (a whole number)"),
    "key a list": ("? [a]\n: 1\n", (1, 3), "a key must be text, not a list"),
    "merge key": (RULE + "<<: {}\n", (2, 1), "unknown key '<<'"),
    "python object": ("rules: !!python/object/apply:os.system [id]\n", (1, 8), "tags are not allowed"),
    "python name in options": (
        _rule("{match: {name: a}, replace: a, options: {x: !!python/name:os.system }}"), (2, 49), "tags are not"),
    "plain tag": ("name: !!str a\n", (1, 7), "tags are not allowed in a recipe ('tag:yaml.org,2002:str')"),
    "anchor": ("name: &a x\n", (1, 7), "anchors (&name) and aliases (*name) are not allowed"),
    "alias": (_rule("{match: {name: *a}, replace: a}"), (2, 20), "quote a pattern that begins with a star"),
    "alias bomb": (
        "a: &a [x, x]\n" + "".join(f"{y}: &{y} [*{x}, *{x}]\n" for x, y in zip("abcdefgh", "bcdefghi", strict=True)),
        (1, 4), "anchors"),
    "recursive alias": ("a: &a [*a]\n", (1, 4), "anchors"),
    "deep lists": ("a: " + "[" * 30_000, (1, 3 + MAX_DEPTH), f"nested deeper than {MAX_DEPTH} levels"),
    "deep mappings": ("{a: " * 15_000, (1, 2 + 4 * (MAX_DEPTH - 1)), f"nested deeper than {MAX_DEPTH} levels"),
    "deep block": ("- " * 30_000, (1, 1 + 2 * MAX_DEPTH), f"nested deeper than {MAX_DEPTH} levels"),
    "too large": (RULE + "# " + "x" * MAX_BYTES, None, "at most 64 KB"),
    "10 MB": ("x" * 10_000_000, None, "at most 64 KB"),
    "escape out of range": ('name: "\\UFFFFFFFF"\n', (1, 10), "an escape or a version is out of range"),
    "version of many digits": ("%YAML 1." + "9" * 9_999 + "\n---\n", (1, 9), "an escape or a version is out of range"),
    "terminal escape": ('description: "\\e[2J"\n', (1, 14), "the character '\\x1b' is not allowed"),
    "raw control character": ("name: a\x07\n", (1, 8), "the character '\\x07' is not allowed"),
    "surrogate": ('name: "\\ud800"\n', (1, 7), "the character '\\ud800' is not allowed"),
    "name not a word": ("name: ../x\n" + RULE, (1, 7), "the name of a recipe has the form"),
    "description a list": ("description: [a]\n" + RULE, (1, 14), "description must be text, not a list"),
    "rule not a mapping": (_rule("linear"), (2, 5), "a rule must be a mapping, not 'linear' (text)"),
    "rule without match": (_rule("{replace: keep}"), (2, 5), "a rule needs the key 'match'"),
    "rule without replace": (_rule("{match: {name: a}}"), (2, 5), "a rule needs the key 'replace'"),
    "two rules of one name": (_rule("{name: a, match: {name: a}, replace: keep}\n  - {name: a}"), (3, 5), "in line 2"),
    "match empty": (_rule("{match: {}, replace: keep}"), (2, 13), "match is empty"),
    "match a word": (_rule("{match: head, replace: keep}"), (2, 13), "match must be a mapping"),
    "role unknown": (_rule("{match: {role: q_porj}, replace: keep}"), (2, 20), "did you mean 'q_proj'?"),
    "role in a list unknown": (_rule("{match: {role: [head, hed]}, replace: keep}"), (2, 27), "did you mean 'head'?"),
    "role list empty": (_rule("{match: {role: []}, replace: keep}"), (2, 20), "must not be an empty list"),
    "class a path": (_rule("{match: {class: torch.nn.Linear}, replace: keep}"), (2, 21), "the name of a class"),
    "pattern long": (_rule(f"{{match: {{name: {'a' * (MAX_PATTERN + 1)}}}, replace: a}}"), (2, 20), "at most 8 stars"),
    "pattern of stars": (_rule(f"{{match: {{name: '{'*a' * (MAX_STARS + 1)}'}}, replace: a}}"), (2, 20), "stars"),
    "pattern empty": (_rule("{match: {name: ''}, replace: a}"), (2, 20), "a name pattern has 1 to 200 characters"),
    "pattern a number": (_rule("{match: {name: [1]}, replace: a}"), (2, 21), "name must be text, not 1"),
    "shape negative": (_rule("{match: {shape: {min_n: -1}}, replace: a}"), (2, 29), "min_n must be at least 0"),
    "shape a bool": (_rule("{match: {shape: {min_n: true}}, replace: a}"), (2, 29), "not True (true or false)"),
    "shape upside down": (_rule("{match: {shape: {min_k: 9, max_k: 8}}, replace: a}"), (2, 21), "min_k is over max_k"),
    "dotted import path": (_rule("{match: {name: a}, replace: os.system}"), (2, 33), "a recipe never imports code"),
    "colon import path": (_rule("{match: {name: a}, replace: 'pkg.mod:Cls'}"), (2, 33), "a recipe never imports code"),
    "dunder name": (_rule("{match: {name: a}, replace: __import__}"), (2, 33), "a recipe never imports code"),
    "file as a name": (_rule("{match: {name: a}, replace: ./x.py}"), (2, 33), "a recipe never imports code"),
    "replace a list": (_rule("{match: {name: a}, replace: [a]}"), (2, 33), "replace must be text, not a list"),
    "options a list": (_rule("{match: {name: a}, replace: a, options: [1]}"), (2, 45), "options must be a mapping"),
    "option not a word": (_rule("{match: {name: a}, replace: a, options: {A b: 1}}"), (2, 46), "the name of an option"),
    "keep with options": (_rule("{match: {name: a}, replace: keep, options: {x: 1}}"), (2, 5), "has no options"),
    "otherwise unknown": (_rule("{match: {name: a}, replace: a, otherwise: eror}"), (2, 47), "did you mean 'error'?"),
    "optional a word": (_rule("{match: {name: a}, replace: a, optional: yes}"), (2, 46), "true or false, not 'yes'"),
    "metric unknown": (RULE + "verify: {metric: relativ_rmse}\n", (2, 18), "did you mean 'relative_rmse'?"),
    "on_failure unknown": (RULE + "verify: {on_failure: ignore}\n", (2, 22), "known: keep, error"),
    "bound nan": (RULE + "verify: {bound: .nan}\n", (2, 17), "a number must be finite, not '.nan'"),
    "bound NaN": (RULE + "verify: {bound: NaN}\n", (2, 17), "bound must be a number or a whole number, not 'NaN'"),
    "bound infinite": (RULE + "verify: {bound: -.INF}\n", (2, 17), "a number must be finite"),
    "bound overflows": (RULE + "verify: {bound: 1e999}\n", (2, 17), "a number must be finite"),
    "bound negative": (RULE + "verify: {bound: -0.1}\n", (2, 17), "bound must be at least 0, not -0.1"),
    "bound of no rule": (RULE + "verify: {bounds: {linear: 1}}\n", (2, 19), "no rule is named 'linear'"),
    "number of many digits": (RULE + "verify: {bound: " + "1" * 5_000 + "}\n", (2, 17), "at most 40 characters"),
    "cache unknown": (RULE + "runtime: {cache: stok}\n", (2, 18), "did you mean 'stock'?"),
    "graph a bool": (RULE + "runtime: {graph: false}\n", (2, 18), "graph must be text, not False"),
    "speculate unknown": (RULE + "runtime: {speculate: lookup}\n", (2, 22), "did you mean 'prompt_lookup'?"),
    "max_length zero": (RULE + "runtime: {max_length: 0}\n", (2, 23), "max_length must be at least 1"),
    "max_length a fraction": (RULE + "runtime: {max_length: 1.5}\n", (2, 23), "must be a whole number, not 1.5"),
    "extends unknown": ("extends: int9\n", (1, 10), "no bundled recipe is called 'int9'; did you mean 'int"),
    "extends a list": ("extends: [int8]\n", (1, 10), "extends must be text"),
    "extends a path in text": ("extends: ./a.yaml\n", (1, 10), "a path needs a file to be relative to"),
    "override of nothing": (
        "extends: int8\nrules: [{name: liner, options: {group_size: 64}}]\n", (2, 9), "did you mean 'linear'?"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "place", "message"), BAD.values(), ids=BAD.keys())
def test_refused(text: str, place: tuple[int, int] | None, message: str) -> None:
    error = _refused(text)
    assert message in str(error)
    assert (error.line, error.column) == (place or (None, None))
    assert len(str(error)) < 400
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"a": "extends: ./a.yaml"}, "a.yaml -> F/a.yaml", id="itself"),
        pytest.param(
            {"a": "extends: ./b.yaml", "b": "extends: c.yaml", "c": "extends: ../F/a.yaml"},
            "F/a.yaml -> F/b.yaml -> F/c.yaml -> F/a.yaml",
            id="circle",
        ),
        pytest.param({f"r{i}": f"extends: r{i + 1}.yaml" for i in range(40)}, "more than 16", id="long chain"),
        pytest.param({"a": "extends: gone.yaml"}, "F/gone.yaml: no such file", id="missing"),
        pytest.param({"a": "extends: ./secret.txt"}, "ends in .yaml or .yml", id="not a recipe's file"),
        pytest.param({"a": "extends: b.yaml", "b": "ruls: []"}, "b.yaml:1:1: unknown key", id="mistake in the base"),
    ],
)
def test_extends_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    folder = tmp_path / "F"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        recipes.load(folder / f"{next(iter(files))}.yaml")
    assert message in str(caught.value).replace(str(tmp_path) + os.sep, "")
    assert caught.value.line == 1


def test_a_circle_through_a_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    with pytest.raises(RecipeError, match="extends goes in a circle"):
        recipes.load(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("gone.yaml", "no such file", id="missing"),
        pytest.param(".", "no bundled recipe is called '.'", id="dot"),
        pytest.param("./", "no such file", id="folder"),
        pytest.param("/dev/zero", "no such file", id="device"),
        pytest.param("a\0/b.yaml", "a", id="nul"),
        pytest.param("", "no bundled recipe is called ''", id="empty name"),
        pytest.param("../int8", "no such file", id="no way out of the bundle"),
        pytest.param("int-8", "did you mean 'int8'?", id="misspelt"),
    ],
)
def test_no_such_recipe(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.load(name)
    assert message in str(caught.value)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:  # a mode of 0 would not stop root
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "a.yaml"
    file.write_text(RULE)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RecipeError, match=r"cannot be read: .*Permission denied"):
        recipes.load(file)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes("description: é\nname: ".encode() + b"\xff\n")
    with pytest.raises(RecipeError, match="byte 0xff is not UTF-8") as caught:
        recipes.load(file)
    assert (caught.value.line, caught.value.column) == (2, 7)


def test_a_file_of_10_mb_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"x" * 10_000_000)
    tracemalloc.start()
    with pytest.raises(RecipeError, match="at most 64 KB"):
        recipes.load(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("*a" * MAX_STARS + "b", id="stars"),
        pytest.param("*" + "a" * 95 + "*" + "a" * 95 + "b", id="long pieces"),
        pytest.param("*[ab]?" * MAX_STARS + "c", id="sets"),
        pytest.param("*" * MAX_STARS + "b", id="stars in a row"),
    ],
)
def test_no_pattern_is_slow(pattern: str) -> None:
    recipes.parse(_rule(f"{{match: {{name: '{pattern}'}}, replace: keep}}"))
    start = time.perf_counter()
    assert not Match(name=(pattern,)).fits_name("a" * 10_000)
    assert time.perf_counter() - start < 0.1
