"""A place of its own for libraries that are built, with nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelpatch.kernels.compiling import libraries
from tests.support.small_library import COMPILER, SOURCE, small, write_compiler


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, two small sources, a compiler that writes down each run of it, and nothing loaded yet."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ACCELPATCH_KERNELS", raising=False)
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "answer.h"\n' + SOURCE)
    (folder / "two.cpp").write_text('extern "C" int other() { return 2; }\n')
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    write_compiler(tmp_path, f'exec {COMPILER} "$@"')
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setattr(libraries, "target", lambda name, device: small(folder))
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})
    return tmp_path
