"""C++ files as functions of the CPU; cache entries that are damaged, stale or open to others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import accelpatch
from accelpatch import cache
from accelpatch.errors import CacheError, KernelError
from tests.support.small_library import needs_compiler


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


CPP = 'extern "C" void add(const float* x, float* y, short n, double by, float times) {\n' \
      "  for (int i = 0; i < n; ++i) y[i] = x[i] * times + by;\n}\n"  # fmt: skip


def add(x: torch.float32, y: torch.float32, n, by, times): ...  # type: ignore[valid-type, no-untyped-def]


@needs_compiler
def test_a_function_of_a_cpu(place: Path) -> None:
    (place / "add.cpp").write_text(CPP)
    made, x = accelpatch.module(place / "add.cpp")(add), torch.arange(5.0)
    y = torch.zeros(5)
    made(x, y, 4, 1, 0.5)
    assert y.tolist() == [1.0, 1.5, 2.0, 2.5, 0.0]
    made(x.data_ptr(), y, -1, 1, 0.5)
    assert y.tolist() == [1.0, 1.5, 2.0, 2.5, 0.0]
    for values, message in (
        ((x.double(), y, 4, 1, 1), "x is torch.float64, and it is annotated as torch.float32"),
        ((x, y, 1 << 15, 1, 1), "n is 32768, which does not fit an integer of 2 bytes"),
        ((x, y), r"add takes 5 arguments \(x, y, n, by, times\), not 2"),
    ):
        with pytest.raises(accelpatch.AccelpatchError, match=message):
            made(*values)


@needs_compiler
def test_what_is_wrong_with_a_function_of_a_cpu(place: Path) -> None:
    (place / "add.cpp").write_text(CPP.replace('extern "C" ', "").replace("float* x", "Number x"))
    with pytest.raises(KernelError, match=r"(?s)add\.cpp was not compiled .*add\.cpp:1:.*Number.*does not name"):
        accelpatch.module(place / "add.cpp")(add)(1, 2, 3, 4, 5)
    (place / "add.cpp").write_text(CPP.replace('extern "C" ', ""))
    with pytest.raises(KernelError, match='has no function add: declare it extern "C"'):
        accelpatch.module(place / "add.cpp")(add)(1, 2, 3, 4, 5)


@needs_compiler
def test_a_cache_entry_that_is_damaged_stale_or_open_to_others(place: Path) -> None:
    (place / "add.cpp").write_text(CPP)
    made = accelpatch.module(place / "add.cpp")(add)
    path = made.compile()
    right = path.read_bytes()
    path.write_bytes(right[:-1] + b"x")
    assert made.compile().read_bytes() == right, "compiled again"
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"made_of": "', '"made_of": "0'))
    assert made.compile().read_bytes() == right
    path.parent.chmod(0o777)
    with pytest.raises(
        CacheError, match=r"is writable by others: chmod go-w .*, or run `accelpatch cache clear kernels`"
    ):
        made.compile()
    path.parent.chmod(0o700)
    assert made.compile() == path
    cache.clear("kernels")
    assert made.compile().read_bytes() == right


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a folder to another user")
def test_a_cache_entry_of_another_user_is_refused(place: Path) -> None:
    (place / "add.cpp").write_text(CPP)
    made = accelpatch.module(place / "add.cpp")(add)
    folder = made.compile().parent
    os.chown(folder, 12345, -1)
    with pytest.raises(CacheError, match=r"belongs to user 12345, not 0: run `accelpatch cache clear kernels`"):
        made.compile()
