"""docs/operations.md and docs/own-kernels.md run from their first line to their last; their files are in examples/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accelpatch.bench import linear_kernels, read_limit
from tests.support import amd_toolchain, chapter, plugins
from tests.support.small_library import needs_compiler

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
HAS_AMD = amd_toolchain.CLANG is not None and amd_toolchain.BITCODE.is_dir()


@pytest.fixture(autouse=True)
def _reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reader's folder, and compiler for AMD."""
    monkeypatch.chdir(tmp_path)
    if HAS_AMD:
        monkeypatch.setenv("HIPCC", str(amd_toolchain.hipcc(tmp_path / "rocm")))
    yield
    plugins.forget()


@needs_compiler
def test_how_to_add_an_operation(tmp_path: Path) -> None:
    ran = chapter.run(ROOT / "docs/operations.md", tmp_path, leave_out="" if HAS_AMD else "gfx90a")
    assert ran[:5] == ["python", "python", "scaled_add.cpp", "python", "python"]
    assert ran.count("python") == (8 if HAS_AMD else 7)


def test_its_files_are_the_example() -> None:
    shown = list(chapter.blocks((ROOT / "docs/operations.md").read_text()))
    for name, _, text in shown:
        if name:
            assert text == (EXAMPLES / name).read_text()
    example = (EXAMPLES / "scaled_add.py").read_text()
    (function,) = [text for _, language, text in shown if language == "python" and "on_gpu([" in text]
    assert function.partition("\n")[2] in example


@needs_compiler
def test_kernels_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (read_limit, linear_kernels):
        monkeypatch.setattr(module, "last_level_cache", lambda: 0)
    monkeypatch.setattr(read_limit, "FLOOR", 1 << 22)
    ran = chapter.run(ROOT / "docs/own-kernels.md", tmp_path, leave_out="" if HAS_AMD else "gfx90a")
    assert ran.count("sh") == 2
    assert ran.count("python") == (4 if HAS_AMD else 3)
    assert [name for name in ran if "." in name] == ["scale.hip", "scale.cpp", "my_linear.py", "my_linear.yaml"]
