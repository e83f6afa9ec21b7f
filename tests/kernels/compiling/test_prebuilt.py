"""Libraries that were built elsewhere: whose folders are loaded from, and what is done where one is damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accelpatch.errors import LibraryError
from accelpatch.kernels.compiling import entries, libraries, prebuilt
from tests.support.small_library import (
    DEVICE,
    afresh,
    compiled,
    entry,
    needs_compiler,
    small,
)

pytestmark = needs_compiler


def not_a_library(folder: Path) -> None:
    """Library and manifest agree with each other, and the system cannot load it: as one of another C library."""
    (folder / libraries.LIBRARY).write_bytes(b"not for this system")
    facts = json.loads((folder / libraries.MANIFEST).read_text())
    facts["sha256"] = entries.sha256(folder / libraries.LIBRARY)
    (folder / libraries.MANIFEST).write_text(json.dumps(facts))


def changed(folder: Path) -> None:
    with (folder / libraries.LIBRARY).open("ab") as file:
        file.write(b"\0")


@pytest.fixture
def shipped(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a library that came with accelpatch, and no library in the cache."""
    folder = libraries.export("small", DEVICE, place / "shipped")
    shutil.rmtree(place / "cache")
    monkeypatch.setattr(prebuilt, "SHIPPED", place / "shipped")
    (place / "log").unlink()
    return folder


def without_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(place / "nowhere"))


def test_what_does_not_load_is_built_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    libraries.locate("small", small(place / "sources"))
    not_a_library(entry(place))
    assert afresh(monkeypatch).answer() == 42
    assert compiled(place) == 4
    assert f"{entry(place) / 'library.so'} does not load" in capfd.readouterr().err


def test_what_does_not_load_and_cannot_be_built_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = libraries.export("small", DEVICE, place / "prebuilt")
    not_a_library(folder)
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(place / "prebuilt"))
    with pytest.raises(LibraryError, match=r"small-here/library\.so does not load .*unset ACCELPATCH_KERNELS"):
        afresh(monkeypatch)


def test_a_shipped_library_needs_no_compiler(place: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(place, monkeypatch)
    assert libraries.why_not("small", DEVICE) is None
    assert libraries.source_of("small", DEVICE) == f"came with accelpatch, {shipped}"
    assert afresh(monkeypatch).answer() == 42
    libraries.prepare(["small"], DEVICE)
    assert libraries.build(["small"], DEVICE) == [shipped]
    assert compiled(place) == 0


@pytest.mark.parametrize("damage", [not_a_library, changed], ids=lambda f: f.__name__)
def test_a_damaged_shipped_library_is_built(
    place: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    damage(shipped)
    assert afresh(monkeypatch).answer() == 42
    assert compiled(place) == 2


@pytest.mark.parametrize("damage", [not_a_library, changed], ids=lambda f: f.__name__)
def test_a_damaged_shipped_library_is_named_where_none_can_be_built(
    place: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    damage(shipped)
    without_compiler(place, monkeypatch)
    with pytest.raises(LibraryError, match=r"small-here/library\.so, which came with accelpatch.* install accelpatch"):
        afresh(monkeypatch)
    assert str(shipped) in str(libraries.why_not("small", DEVICE))


def test_a_shipped_library_of_other_sources_is_not_taken(
    place: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "sources/answer.h").write_text("#define ANSWER 43\n")
    assert afresh(monkeypatch).answer() == 43
    assert compiled(place) == 2


def of_the_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("part", ["", "small-here", "small-here/library.so", "small-here/manifest.json"])
@pytest.mark.parametrize(
    "spoil, words", [(of_the_group, "writable by others"), (a_link, "is a link")], ids=["group", "link"]
)
def test_a_folder_that_others_may_write_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, part: str, spoil: Callable[[Path], None], words: str
) -> None:
    libraries.export("small", DEVICE, place / "prebuilt")
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(place / "prebuilt"))
    assert libraries.why_not("small", DEVICE) is None
    spoil(place / "prebuilt" / part)
    assert words in str(libraries.why_not("small", DEVICE))
    with pytest.raises(LibraryError, match=words):
        afresh(monkeypatch)


def test_what_is_exported_is_private_whatever_the_umask_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        libraries.export("small", DEVICE, place / "prebuilt")
    finally:
        os.umask(before)
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(place / "prebuilt"))
    assert afresh(monkeypatch).answer() == 42
