"""docs/contributing: what the chapters have a contributor write is applied to a copy of the package, and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import scratch

ROOT = Path(__file__).parent.parent
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "contributing").glob("*.md"))}
#: chapter -> what runs besides the tests that it shows
BESIDE = {
    "add-a-family": [
        "tests/models/test_families.py::test_logits_tokens_and_the_way_back[cwm-int4]",
        "tests/models/test_families.py::test_bfloat16[cwm-exact]",
        "tests/models/test_family_table.py",
    ],
    "add-an-operation": [
        "tests/kernels/ops/test_operations.py::test_random_shapes[softcap]",
        "tests/kernels/ops/test_operations.py::test_opcheck[softcap-float16]",
        "tests/kernels/ops/test_operations.py::test_views[softcap-bfloat16-transposed]",
        "tests/test_gate.py::test_every_triton_kernel_is_compiled_by_the_gate",
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of the package for each chapter, with what it says."""
    made = {name: scratch.copied(tmp_path_factory.mktemp(name)) for name in PAGES}
    said = {name: scratch.apply(page, made[name]) for name, page in PAGES.items()}
    assert not any(said.values()), said
    return made


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, tuple[int, str]]:
    """What pytest says of each chapter."""
    runs = {folders[name]: [*shown_tests(name), *BESIDE.get(name, [])] for name in PAGES}
    found = scratch.run(runs)
    return {name: found[folders[name]] for name in PAGES}


def shown_tests(chapter: str) -> list[str]:
    return [name for name in scratch.new_files(PAGES[chapter]) if name.startswith("tests/")]


def test_the_chapters_are_those_that_are_known() -> None:
    assert set(PAGES) == {"add-a-family", "add-a-format", "add-a-replacer", "add-an-operation"}
    assert all(len(shown_tests(name)) == 1 for name in PAGES)
    assert all(page.count("```") == 2 * (len(scratch.new_files(page)) + page.count("```diff") + page.count("```sh"))
               for page in PAGES.values())  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("chapter", PAGES)
def test_a_chapter_works(chapter: str, results: dict[str, tuple[int, str]]) -> None:
    status, printed = results[chapter]
    assert status == 0, printed[-3000:]
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make gate runs this")
def test_the_triton_kernel_of_a_chapter(folders: dict[str, Path]) -> None:
    """Through Triton's interpreter."""
    place, found = folders["add-an-operation"], find_spec("triton")
    assert found is not None
    assert found.origin is not None
    path = os.pathsep.join(map(str, (place, Path(found.origin).absolute().parents[1])))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    words = ["-q", "-p", "no:cacheprovider", "tests/kernels/triton/test_triton.py", "-k", "softcap and float_rule"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=place, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "8 passed" in done.stdout


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_what_they_show_passes_the_linter(words: list[str], folders: dict[str, Path]) -> None:
    files = [str(folders[name] / file) for name, page in PAGES.items() for file in scratch.changed_files(page)]
    done = subprocess.run([sys.executable, "-m", "ruff", *words, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
