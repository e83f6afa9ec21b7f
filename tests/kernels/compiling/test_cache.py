"""The build cache: what a key is made of, who builds, what is never loaded, what is said where nothing builds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accelpatch import cache
from accelpatch.errors import CacheError, KernelError
from accelpatch.kernels.compiling import entries, libraries
from accelpatch.kernels.compiling.libraries import Target
from tests.support.small_library import (
    COMPILER,
    DEVICE,
    afresh,
    compiled,
    entry,
    needs_compiler,
    small,
    write_compiler,
)


@needs_compiler
def test_builds_once_and_loads(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.library("small", DEVICE).answer() == 42
    assert libraries.library("small", DEVICE) is libraries.library("small", DEVICE)
    assert afresh(monkeypatch).answer() == 42
    assert compiled(place) == 2
    assert sorted(path.name for path in entry(place).iterdir()) == ["library.so", "manifest.json"]
    assert (place / "cache").stat().st_mode & 0o777 == 0o700


def edit_source(place: Path) -> None:
    (place / "sources/two.cpp").write_text('extern "C" int other() { return 3; }\n')


def edit_header(place: Path) -> None:
    (place / "sources/answer.h").write_text("#define ANSWER 43\n")


def add_header(place: Path) -> None:
    (place / "sources/more.inc").write_text("")


def edit_compiler(place: Path) -> None:
    text = (place / "compiler").read_text()
    (place / "compiler").write_text(text.replace("#!/bin/sh", '#!/bin/sh\n[ "$1" = --version ] && echo newer'))
    libraries.identity.cache_clear()


@needs_compiler
@pytest.mark.parametrize("change", [edit_source, edit_header, add_header, edit_compiler], ids=lambda f: f.__name__)
def test_a_change_is_another_entry(place: Path, change: Callable[[Path], None]) -> None:
    path = libraries.compiler(small(place / "sources"))
    assert path is not None
    before = libraries.key("small", small(place / "sources"), path)
    change(place)
    assert libraries.key("small", small(place / "sources"), path) != before


@needs_compiler
@pytest.mark.parametrize("field", ["flags", "link", "arch", "sources"])
def test_flags_and_machine_are_in_the_key(place: Path, field: str) -> None:
    plain, path = small(place / "sources"), libraries.compiler(small(place / "sources"))
    assert path is not None
    other = {
        "flags": ("-fPIC", "-O3"),
        "link": ("-shared", "-g"),
        "arch": "there",
        "sources": {"one.cpp": ("-O3",), "two.cpp": ()},
    }
    changed = Target(**{**vars(plain), field: other[field]})
    assert libraries.key("small", changed, path) != libraries.key("small", plain, path)


def test_no_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(place / "nowhere"))
    reason = libraries.why_not("small", DEVICE)
    assert reason is not None
    assert "install one" in reason
    with pytest.raises(KernelError, match="there is no C\\+\\+ compiler here \\(g\\+\\+\\)"):
        libraries.library("small", DEVICE)


def test_named_compiler_is_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = libraries.why_not("small", DEVICE)
    assert reason is not None
    assert "CXX names 'no-such-compiler'" in reason


@needs_compiler
def test_compiler_that_fails(place: Path) -> None:
    (place / "sources/two.cpp").write_text("this is no program\n")
    assert libraries.why_not("small", DEVICE) is None
    with pytest.raises(KernelError, match=r"two\.cpp.*failed with status 1") as caught:
        libraries.library("small", DEVICE)
    assert "error:" in str(caught.value)
    assert "torch's own operations" in str(caught.value)
    runs = compiled(place)
    with pytest.raises(KernelError, match="failed with status 1"):
        libraries.library("small", DEVICE)
    assert compiled(place) == runs, "a failure is not tried again"
    assert libraries.why_not("small", DEVICE) == str(caught.value)
    assert list((place / "cache/kernels").glob(".partial*")) == []


PROCESS = """
import sys
from pathlib import Path
from accelpatch.device import Device
from accelpatch.kernels.compiling import libraries
sources = {"one.cpp": (), "two.cpp": ()}
libraries.target = lambda *_: libraries.Target(sys.argv[1], sources, ("g++",), ("-fPIC",), ("-shared",), "here")
print(libraries.library("small", Device("cpu", "cpu", "x86-64", "a CPU", 1 << 30, 1)).answer())
"""


def start(place: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(place / "sources")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=dict(os.environ))


@needs_compiler
def test_sixteen_processes_from_cold_build_once(place: Path) -> None:
    processes = [start(place) for _ in range(16)]
    assert [process.communicate(timeout=240)[0] for process in processes] == ["42\n"] * 16
    assert compiled(place) == 2


@needs_compiler
def test_a_builder_killed_half_way_fifty_times(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(place, f'sleep 0.02\nexec {COMPILER} "$@"')
    made, path = small(place / "sources"), libraries.compiler(small(place / "sources"))
    assert path is not None
    libraries.identity(path)
    rng = random.Random(5)
    for _ in range(50):
        child = os.fork()
        if child == 0:
            os.setsid()
            libraries.locate("small", made)
            os._exit(0)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = cache.entry(libraries.KIND, libraries.key("small", made, path))
        assert finished is None or entries.disagreement(finished, libraries.digest(made), libraries.LIBRARY) is None
        cache.clear(libraries.KIND)
    assert afresh(monkeypatch).answer() == 42
    assert list((place / "cache/kernels").glob(".partial*")) == []


def truncate(folder: Path) -> None:
    library = folder / libraries.LIBRARY
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def swap(folder: Path) -> None:
    library = folder / libraries.LIBRARY
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def lose(folder: Path) -> None:
    (folder / libraries.LIBRARY).unlink()


def spoil_manifest(folder: Path) -> None:
    (folder / libraries.MANIFEST).write_text("{")


def other_pair(folder: Path) -> None:
    """Library and manifest agree with each other, but were made of something else."""
    facts = json.loads((folder / libraries.MANIFEST).read_text())
    (folder / libraries.MANIFEST).write_text(json.dumps({**facts, "made_of": "0" * 64}))


DAMAGES = [truncate, swap, lose, spoil_manifest, other_pair]


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damaged_entry_is_built_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    libraries.locate("small", small(place / "sources"))
    damage(entry(place))
    assert afresh(monkeypatch).answer() == 42
    assert compiled(place) == 4


def open_to_others(root: Path) -> None:
    root.chmod(0o777)


def a_link(root: Path) -> None:
    real = root.with_name("elsewhere")
    root.rename(real)
    root.symlink_to(real)


@needs_compiler
@pytest.mark.parametrize("spoil", [open_to_others, a_link], ids=lambda f: f.__name__)
def test_folder_that_is_not_private_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    libraries.locate("small", small(place / "sources"))
    spoil(place / "cache")
    with pytest.raises(CacheError):
        afresh(monkeypatch)


@needs_compiler
def test_prebuilt_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.export("small", DEVICE, place / "prebuilt")
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(place / "prebuilt"))
    monkeypatch.setenv("PATH", str(place / "nowhere"))
    monkeypatch.delenv("CXX")
    assert libraries.why_not("small", DEVICE) is None
    assert afresh(monkeypatch).answer() == 42


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damaged_prebuilt_folder_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    folder = libraries.export("small", DEVICE, place / "prebuilt")
    damage(folder)
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(place / "prebuilt"))
    with pytest.raises(KernelError, match="ACCELPATCH_KERNELS"):
        afresh(monkeypatch)


def test_unknown_library() -> None:
    with pytest.raises(KernelError, match="no library 'nothing'"):
        libraries.target("nothing", DEVICE)
