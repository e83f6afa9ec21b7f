"""The recipes that come with accelpatch: what they say, and that every way of installing finds them."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.schema import Units

ROOT = Path(__file__).parents[2]
BUNDLED = (
    "compact", "exact", "flash", "fp8", "gguf", "int3", "int4", "int4-awq", "int4-gptq", "int8", "smoothquant",
    "smoothquant-opt", "smoothquant-static", "train",
)  # fmt: skip


def test_bundled_recipes() -> None:
    assert recipes.bundled() == BUNDLED


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_recipe_round_trips(name: str) -> None:
    recipe = recipes.load(name)
    assert (recipe.name, recipe.source) == (name, f"{name}.yaml")
    assert recipe.description
    assert "\n" not in recipe.description
    assert recipes.parse(recipes.dump(recipe)) == recipe
    assert recipes.load(recipe) is recipe
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe


def test_bundled_recipes_say_what_the_design_says() -> None:
    exact, int8, int4 = (recipes.load(name) for name in ("exact", "int8", "int4"))
    assert [(rule.name, rule.replace, rule.optional) for rule in exact.rules] == [
        ("layer", "fused_layer", True),
        ("norm", "rmsnorm", True),
        ("rotary", "rotary_embedding", True),
        ("mlp", "gated_mlp", True),
        ("product", "gemv", True),
        ("experts", "experts", True),
    ]
    assert [(rule.name, rule.replace) for rule in int8.rules[:-6]] == [
        ("head", "int8_weight_only"),
        ("router", "keep"),
        ("linear", "int8_weight_only"),
        ("embedding", "keep"),
    ]
    assert int8.rules[-6:-1] == int4.rules[-6:-1] == exact.rules[:-1]
    assert [(one.rules[-1].replace, one.rules[-1].optional) for one in (int8, int4)] == [
        ("int8_experts", True), ("int4_experts", True),
    ]  # fmt: skip
    assert [rule.name for rule in int4.rules] == [rule.name for rule in int8.rules]
    head, _, linear, _ = int4.rules[:4]
    assert (head.replace, linear.replace) == ("int8_weight_only", "int4_weight_only")
    assert linear.options == {"group_size": [128, 64, 32], "symmetric": False}
    assert exact.verify.bound == Units(8)
    assert int8.verify.bound < int4.verify.bound
    assert {recipe.verify.on_failure for recipe in (exact, int8, int4)} == {"keep"}


def test_smoothquant_is_int8_with_other_linear_layers() -> None:
    int8, dynamic, static = (recipes.load(name) for name in ("int8", "smoothquant", "smoothquant-static"))
    first, *others = dynamic.rules
    assert (first.name, first.replace, first.optional) == ("layernorm", "layernorm", True)
    assert [rule.name for rule in others] == [rule.name for rule in int8.rules]
    for one, activations in ((dynamic, "dynamic"), (static, "auto")):
        linear = next(rule for rule in one.rules if rule.name == "linear")
        assert linear.replace == "w8a8"
        assert linear.options["activations"] == activations
        assert one.calibrate == {"samples": 16, "length": 256, "alpha": 0.65}
        assert int8.verify.bound < one.verify.bound == 0.15
    assert int8.calibrate is None


def test_fp8_is_int8_with_other_linear_layers() -> None:
    int8, fp8 = (recipes.load(name) for name in ("int8", "fp8"))
    assert [rule.name for rule in fp8.rules] == [rule.name for rule in int8.rules]
    linear = next(rule for rule in fp8.rules if rule.name == "linear")
    assert (linear.replace, dict(linear.options), fp8.calibrate) == ("w8a8_fp8", {}, None)
    assert fp8.verify.bound == recipes.load("smoothquant").verify.bound


def _installed(folder: Path, *, inside: bool) -> Path:
    """accelpatch under ``folder``: the recipes ``inside`` the package as in a wheel, or beside it as in a checkout."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "accelpatch", folder / "accelpatch", ignore=ignore)
    shutil.copytree(ROOT / "recipes", folder / "accelpatch" / "recipes" if inside else folder / "recipes")
    return folder


def _listed(path: Path) -> str:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from accelpatch.recipe import recipe; "
        "print(recipe.__file__, recipe.bundled()); recipe.load('int4')"
    )
    command = [sys.executable, "-I", "-c", code, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert str(path) in result.stdout, "another accelpatch was imported"
    return result.stdout


def test_a_wheel_has_them_inside_the_package(tmp_path: Path) -> None:
    folder = _installed(tmp_path / "site-packages", inside=True)
    (folder / "recipes").mkdir()  # of another package
    (folder / "recipes" / "soup.yaml").write_text("a: b")
    (folder / "pyproject.toml").touch()
    assert str(BUNDLED) in _listed(folder)


def test_a_checkout_has_them_beside_the_package(tmp_path: Path) -> None:
    folder = _installed(tmp_path / "checkout", inside=False)
    (folder / "pyproject.toml").touch()
    assert str(BUNDLED) in _listed(folder)


def test_a_zip_has_them_too(tmp_path: Path) -> None:
    folder = _installed(tmp_path / "unzipped", inside=True)
    archive = tmp_path / "accelpatch.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.rglob("*"):
            file.write(path, path.relative_to(folder))
    assert str(BUNDLED) in _listed(archive)
