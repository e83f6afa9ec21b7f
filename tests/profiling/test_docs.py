"""docs/profiling.md: its commands run, and what they print is what it shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from accelpatch.bench import read_limit
from accelpatch.models import embedded
from accelpatch.profiling import roofline
from tests.cli.conftest import byte_tokenizer, save_model
from tests.profiling.test_counters import COLLECTION
from tests.profiling.test_kernels import GFX942
from tests.support import chapter
from tests.support.one_thread import _one_thread  # noqa: F401

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/profiling.md"


def test_the_chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    tiny = save_model(tmp_path / "tiny", tokenizer=byte_tokenizer())
    monkeypatch.setattr(embedded, "folder", lambda *_: tiny)
    monkeypatch.setattr(read_limit, "FLOOR", 1 << 22)
    monkeypatch.setattr(read_limit, "last_level_cache", lambda: 0)
    monkeypatch.setattr(roofline, "PEAK_ON_CPU", 64)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GFX942, tmp_path / "triton-gfx942")
    (tmp_path / "counter_collection.csv").write_text(COLLECTION)
    assert chapter.run(PAGE, tmp_path) == ["sh"] * 5
    assert sorted(one.name for one in (tmp_path / "profile").iterdir()) == [
        "original.json", "patched.json", "profile.html",
    ]  # fmt: skip


def test_its_pictures_are_there() -> None:
    for name in ("profile.png", "roofline.png"):
        assert f"({name})" in PAGE.read_text()
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")
