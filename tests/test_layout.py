"""The shape of the code: who may import whom, how long things are, what loads torch, what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "accelpatch"

# Package of ours -> (packages of ours that it may import, third parties besides torch). The design's table.
# A file beside others belongs to the row of MEMBERS, else to the row of its first folder or its own name.
IMPORTS: dict[str, tuple[str, str]] = {
    "errors": ("", ""),
    "device": ("", ""),
    "cache": ("errors", ""),  # where finished work of models and kernels lies; added to the design's table
    "report": ("errors", ""),
    "recipe": ("errors", "yaml"),
    "kernels": ("device errors cache", "triton"),  # cache: built device sources are published there
    "quant": ("kernels device errors", ""),
    "modules": ("kernels quant errors", "transformers"),
    "models": ("errors cache", "transformers gguf safetensors"),  # cache: converted checkpoints are published there
    "patching": ("recipe device report errors", ""),
    "replacers": ("patching modules quant kernels models.family device errors", ""),
    "runtime": ("kernels modules report device errors", "transformers"),
    "checkpoints": (
        "replacers patching modules quant models recipe report device errors",
        "transformers safetensors",
    ),
    "bench": ("kernels runtime report device errors", "matplotlib"),  # matplotlib: plots, an optional package
    "api": (
        "errors device cache report recipe kernels quant modules models patching replacers runtime checkpoints bench",
        "",
    ),
    "cli": (
        "api bench kernels.build models.catalog recipe report device errors cache",  # cache: lists and clears it
        "typer rich",
    ),
    "__init__": ("api errors patching.replacer", ""),  # the public names, resolved when first asked for
    "__main__": ("cli", ""),
}
MEMBERS = {"recipe_yaml": "recipe", "recipe_schema": "recipe"}  # recipe.py's reader, in files of readable length

# (file, what it imports): reason. Each is looser than its row.
EXCEPTIONS: dict[tuple[str, str], str] = {}

SOURCES = sorted(PACKAGE.rglob("*.py"))
PYTHON = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _by_name(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [pytest.param(path, id=_name(path)) for path in paths])


def _row(parts: tuple[str, ...]) -> str:
    return MEMBERS.get(parts[0], parts[0]) if parts else "__init__"


def _imports(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """Every module that a file imports, as dotted names, also inside functions and under TYPE_CHECKING.

    ``from a import b`` counts as ``a.b``, which may be a name in ``a`` or a module. ``package``: the file's own.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant):
                found.add(argument.value)
    return found


def _forbidden(path: Path, text: str) -> set[str]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    row = _row(parts)
    ours, theirs = (words.split() for words in IMPORTS[row])
    bad = set()
    for name in _imports(ast.parse(text), ("accelpatch", *parts[:-1])):
        top, _, rest = name.partition(".")
        if top == "accelpatch":
            target = _row(tuple(rest.split("."))) if rest else "__init__"
            allowed = target == row or any(rest == item or rest.startswith(f"{item}.") for item in ours)
            allowed = allowed or target in ours
        else:
            allowed = top in sys.stdlib_module_names or top == "torch" or top in theirs
        if not allowed and (_name(path), name) not in EXCEPTIONS:
            bad.add(name)
    return bad


@_by_name(SOURCES)
def test_imports_are_those_of_the_table(path: Path) -> None:
    assert _row(path.relative_to(PACKAGE).with_suffix("").parts) in IMPORTS, "a new room needs a row in the table"
    assert _forbidden(path, path.read_text()) == set()


@pytest.mark.parametrize(
    ("file", "text", "bad"),
    [
        pytest.param("quant/int8.py", "from accelpatch.models import load", {"accelpatch.models.load"}, id="from"),
        pytest.param("device.py", "def f():\n    import accelpatch.errors", {"accelpatch.errors"}, id="in a function"),
        pytest.param("errors.py", "from . import device", {"accelpatch.device"}, id="relative"),
        pytest.param("quant/int8.py", "from ..api import x", {"accelpatch.api.x"}, id="relative, one up"),
        pytest.param("quant/int8.py", "from . import int4", set(), id="its own room"),
        pytest.param("patching/plan.py", "import yaml", {"yaml"}, id="a third party"),
        pytest.param("recipe_yaml.py", "import yaml, torch, os.path", set(), id="a third party of its row"),
        pytest.param("replacers/a.py", "from accelpatch.models.load import x", {"accelpatch.models.load.x"}, id="part"),
        pytest.param("replacers/a.py", "from accelpatch.models import family", set(), id="the part that is allowed"),
        pytest.param("replacers/a.py", "from accelpatch.models.family import F", set(), id="a name in that part"),
        pytest.param("api.py", "import accelpatch.cli", {"accelpatch.cli"}, id="api and cli"),
        pytest.param("cli/run.py", "from accelpatch import api, quant", {"accelpatch.quant"}, id="cli past the api"),
        pytest.param("kernels/a.py", "__import__('transformers')", {"transformers"}, id="by function"),
        pytest.param(
            "device.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from accelpatch.recipe import Rule",
            {"accelpatch.recipe.Rule"},
            id="for types alone",
        ),
    ],
)
def test_the_walk_sees_what_it_should(file: str, text: str, bad: set[str]) -> None:
    assert _forbidden(PACKAGE / file, text) == bad


def test_the_table_has_no_circle() -> None:
    needs = {row: {_row(tuple(item.split("."))) for item in ours.split()} for row, (ours, _) in IMPORTS.items()}
    assert set().union(*needs.values()) <= set(IMPORTS)
    while needs:
        free = {row for row, of in needs.items() if not of & set(needs)}
        assert free, f"these import each other: {sorted(needs)}"
        needs = {row: of for row, of in needs.items() if row not in free}


@_by_name(PYTHON)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 300
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length >= 40} == {}


@pytest.mark.parametrize("module", ["accelpatch", "accelpatch.cli", "accelpatch.recipe", "accelpatch.device"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_no_file_names_a_place_on_the_machine_that_it_was_written_on() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name and name != "LICENSE"]
    place = re.compile(rb"(?<![\w.~}-])/(?:work|root|home/\w+)/")
    found = [name for name in names if (ROOT / name).is_file() and place.search((ROOT / name).read_bytes())]
    assert len(names) > 20
    assert found == []
