"""The shape of the code: who may import whom, how long things are, what loads torch, what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cpp_functions import functions
from tests.support.imports import EXCEPTIONS, IMPORTS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "accelpatch"

CPP_ENDINGS = (".h", ".hip", ".cpp", ".inc", ".cu")  # those of the Makefile's lint
SOURCES = sorted(PACKAGE.rglob("*.py"))
PYTHON = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]
CPP = sorted(path for folder in (PACKAGE, ROOT / "tests") for end in CPP_ENDINGS for path in folder.rglob(f"*{end}"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _wrong(paths: list[Path], of_text: Callable[[str], Any]) -> dict[str, Any]:
    """File -> what is wrong with it, of those with which something is."""
    return {_name(path): found for path in paths if (found := of_text(path.read_text()))}


def _row(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else "__init__"


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


def test_every_room_has_a_row_in_the_table() -> None:
    assert {_row(path.relative_to(PACKAGE).with_suffix("").parts) for path in SOURCES} == set(IMPORTS)


def test_imports_are_those_of_the_table() -> None:
    assert {_name(path): bad for path in SOURCES if (bad := _forbidden(path, path.read_text()))} == {}


@pytest.mark.parametrize(
    ("file", "text", "bad"),
    [
        pytest.param("quant/int8.py", "from accelpatch.models import load", {"accelpatch.models.load"}, id="from"),
        pytest.param("device.py", "def f():\n    import accelpatch.errors", {"accelpatch.errors"}, id="in a function"),
        pytest.param("errors.py", "from . import device", {"accelpatch.device"}, id="relative"),
        pytest.param("quant/int8.py", "from ..api import x", {"accelpatch.api.x"}, id="relative, one up"),
        pytest.param("quant/int8.py", "from . import int4", set(), id="its own room"),
        pytest.param("patching/plan.py", "import yaml", {"yaml"}, id="a third party"),
        pytest.param("recipe/yaml.py", "import yaml, torch, os.path", set(), id="a third party of its row"),
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


def _long(text: str) -> list[str]:
    """What breaks the rules of length of Python: 300 lines of a file, 40 of a function."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    found = [f"{len(text.splitlines())} lines"] if len(text.splitlines()) >= 300 else []
    return found + [f"{name}: {length} lines" for name, length in lengths.items() if length >= 40]


def test_files_and_functions_are_short() -> None:
    assert _wrong(PYTHON, _long) == {}


def test_what_is_long_is_found() -> None:
    assert _long("def f():\n" + "    x = 1\n" * 39) == ["f: 40 lines"]
    assert _long("x = 1\n" * 300) == ["300 lines"]


# Function: how many lines it has not. Every further division that was tried changes the machine code of this kernel.
LONGER = {"multiply_block": 103}


def _too_long(text: str) -> list[str]:
    """What breaks the rules of length of C++ and HIP: 300 lines of a file, 80 of a function, 120 columns."""
    lines = text.splitlines()
    found = [f"{len(lines)} lines"] if len(lines) >= 300 else []
    found += [f"{len(line)} columns in line {number}" for number, line in enumerate(lines, 1) if len(line) > 120]
    return found + [f"{name}: {length} lines" for name, length in functions(text) if length >= LONGER.get(name, 80)]


def test_cpp_files_and_functions_are_short() -> None:
    assert _wrong(CPP, _too_long) == {}


def test_cpp_exceptions_are_as_long_as_they_say() -> None:
    lengths = {name: length for path in CPP for name, length in functions(path.read_text()) if name in LONGER}
    assert {name: length + 1 for name, length in lengths.items()} == LONGER


def test_cpp_sources_are_found() -> None:
    assert {path.suffix for path in CPP} >= {".h", ".hip", ".cpp", ".inc"}
    assert len([one for path in CPP for one in functions(path.read_text())]) > 800


KERNEL = """
template <class T>
__global__ void __launch_bounds__(64, W > 1 ? 1 : 2)
    kernel(const Args a) {{
{body}}}
"""
BODIES = {
    "braces": "    if (a.x) {\n    }\n",
    "a comment's brace": "    // }\n    /* } */\n",
    "a string's brace": '    say("} \\"}", \'}\');\n\n',
    "a lambda": "    const auto f = [&](int x) {\n        return x; };\n",
    "a local type": "    struct Local { int v; };\n    int w[] = {1};\n",
    "a macro": "#define M(x) { \\\n    x\n",
}


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in BODIES.items()])
def test_a_long_kernel_is_found(body: str) -> None:
    assert _too_long(KERNEL.format(body=body * 37)) == []
    assert _too_long(KERNEL.format(body=body * 38)) == ["kernel: 80 lines"]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        pytest.param('extern "C" int f(int a = 1) {', "f", id="C"),
        pytest.param(
            "namespace {\nstruct alignas(16) S : Of<int> {\n    int v[1] = {2};\n    S() : v{3}, w(4) {", "S", id="S"
        ),
        pytest.param("struct S {\n    bool operator()() const {", "operator()", id="operator"),
        pytest.param("struct S {\n    S() {}\n    ~S() {", "~S", id="destructor"),
    ],
)
def test_a_long_function_is_found(head: str, name: str) -> None:
    lines = "    a += 1;\n" * 78
    closed = "}\n" * (head.count("{") - head.count("}"))
    assert _too_long(f"{head}\n{lines}{closed}") == [f"{name}: 80 lines"]


def test_a_long_file_and_a_long_line_are_found() -> None:
    assert _too_long("int a;\n" * 299) == []
    assert _too_long("int a;\n" * 300) == ["300 lines"]
    assert _too_long(f"// {'x' * 117}\n// {'x' * 118}") == ["121 columns in line 2"]


@pytest.mark.parametrize("module", ["accelpatch", "accelpatch.cli", "accelpatch.recipe.recipe", "accelpatch.device"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_no_file_names_a_place_on_the_machine_that_it_was_written_on() -> None:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name and name != "LICENSE"]
    place = re.compile(rb"(?<![\w.~}-])/(?:work|root|home/\w+)/")
    found = [name for name in names if (ROOT / name).is_file() and place.search((ROOT / name).read_bytes())]
    assert len(names) > 20
    assert found == []
