"""Code objects: assembled for every arch, kept in the user's cache by what they were made from, and checked there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from accelpatch import cache
from accelpatch.errors import CacheError, CompileError
from accelpatch.jit import assembler, jit

pytestmark = pytest.mark.skipif(not shutil.which("clang-19"), reason="needs clang-19 and lld-19 (`make gate`)")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))


def kernel(value: int) -> Any:
    def store(J, n, out: "int*"):
        J.s_store_dword(J.gpr("si32", value + n), out, 0)

    return jit()(store)


def entries() -> list[cache.CacheEntry]:
    return [one for one in cache.listing() if one.kind == assembler.KIND]


def test_it_is_an_elf_for_the_gpu_and_kept() -> None:
    made = kernel(5).compile("gfx942", 1)
    assert made.code.startswith(b"\x7fELF")
    assert b"store.kd" in made.code
    assert (made.name, made.arch, made.sgprs > 0, made.lds) == ("store", "gfx942", True, 0)
    assert len(entries()) == 1
    assert kernel(5).compile("gfx942", 1).code == made.code
    assert len(entries()) == 1


def test_the_key_is_all_that_it_was_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arch, compile-time values, source, what it closes over, and the version."""
    kernel(5).compile("gfx942", 1)
    kernel(5).compile("gfx90a", 1)
    kernel(5).compile("gfx942", 2)
    kernel(6).compile("gfx942", 1)
    monkeypatch.setattr(assembler, "_version", lambda: "9.9")
    kernel(5).compile("gfx942", 1)
    assert len(entries()) == 5


def test_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    code = kernel(5).compile("gfx942", 1).code
    monkeypatch.setattr(assembler, "assembled", lambda *_: pytest.fail("it was there"))
    assert kernel(5).compile("gfx942", 1).code == code


def foreign(folder: Path) -> None:
    held = json.loads((folder / "kernel.json").read_text())
    (folder / "kernel.json").write_text(json.dumps(held | {"source": "def other(): ..."}))


def stale(folder: Path) -> None:
    held = json.loads((folder / "kernel.json").read_text())
    (folder / "kernel.json").write_text(json.dumps(held | {"version": "0.0.1"}))


@pytest.mark.parametrize("damage, message", [
    pytest.param(foreign, "was made from something else than this kernel", id="another kernel's"),
    pytest.param(stale, "was made from something else than this kernel", id="of another version"),
    pytest.param(lambda folder: (folder / "kernel.co").write_bytes(b"\x7fELF"), "is not what was written there",
                 id="other code"),
    pytest.param(lambda folder: (folder / "kernel.json").write_text("{"), "cannot be read", id="no JSON"),
    pytest.param(lambda folder: (folder / "kernel.co").unlink(), "cannot be read", id="half of it"),
])  # fmt: skip
def test_an_entry_that_is_not_this_kernel_s(damage: Any, message: str) -> None:
    kernel(5).compile("gfx942", 1)
    damage(entries()[0].path)
    with pytest.raises(CacheError, match=f"{message}.*remove it by `accelpatch cache clear`"):
        kernel(5).compile("gfx942", 1)


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(CacheError, match="writable by others"):
        kernel(5).compile("gfx942", 1)


def test_a_machine_with_no_assembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(assembler, "_ROCM", tmp_path)
    monkeypatch.setattr(assembler, "_zig", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="nothing here assembles for gfx942: install ROCm, or clang-19"):
        kernel(5).compile("gfx942", 1)
    assert ".amdhsa_kernel store" in kernel(5).source("gfx942", 1)


def test_rocm_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "clang").write_text("")
    monkeypatch.setattr(assembler, "_ROCM", tmp_path)
    assert assembler.tools("gfx950") == assembler.Tools((str(tmp_path / "clang"),), (str(tmp_path / "ld.lld"),))
