"""Libraries that are built together before they are used: which, side by side, with one line about it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelpatch import cache
from accelpatch.device import KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.gpu_libraries import GPU_LIBRARIES
from tests.kernels.compiling.test_cache import COMPILER

HERE = dataclasses.replace(KNOWN["sm_90"], index=0)
NAMES = ("gemv_bf16", "decode_attention_bf16_128")
SOURCES = 3  # of the two
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
# Compiles an empty source instead of a GPU's, and waits until as many as are to be compiled have begun.
SCRIPT = """#!/bin/sh
case " $* " in
  *" --version "*) echo a compiler;;
  *" -c "*)
    for last; do :; done
    echo "$*" >> {place}/log
    case "$*" in *{failing}*) echo error: it is no program >&2; exit 1;; esac
    i=0
    while [ "$(wc -l < {place}/log)" -lt {together} ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
    [ $i -lt 100 ] || exit 1
    echo 'int nothing;' | exec {compiler} -x c++ -fPIC -c - -o "$last";;
  *) for last; do :; done; echo 'int nothing;' | exec {compiler} -x c++ -fPIC -shared - -o "$last";;
esac
"""


def write_compiler(place: Path, *, together: int = 1, failing: str = "nothing_of_that_name") -> None:
    (place / "log").write_text("")
    script = place / "nvcc"
    script.write_text(SCRIPT.format(place=place, together=together, failing=failing, compiler=COMPILER))
    script.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, a compiler that logs what it compiles, and nothing loaded yet."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ACCELPATCH_KERNELS", raising=False)
    write_compiler(tmp_path)
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})
    libraries.identity.cache_clear()
    return tmp_path


def compiled(place: Path) -> list[str]:
    return (place / "log").read_text().splitlines()


def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})


def test_only_what_is_needed_is_compiled_all_of_it_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    write_compiler(place, together=SOURCES)
    libraries.prepare(NAMES, HERE, "recipe int8")
    due = {(source, *flags) for name in NAMES for source, flags in GPU_LIBRARIES[name].items()}
    assert {
        (re.findall(r"hip/(\w+/\w+\.hip) -o", line)[0], *re.findall(r"-DONLY\S+", line)) for line in compiled(place)
    } == due
    assert len(compiled(place)) == SOURCES
    first, last = capfd.readouterr().err.splitlines()
    assert first == (
        "accelpatch: compiling 2 kernel libraries of sm_90 with nvcc for recipe int8 "
        "(gemv_bf16, decode_attention_bf16_128), once for this machine"
    )
    assert re.fullmatch(r"accelpatch: compiled in \d+\.\d s", last)


def test_nothing_is_said_of_what_is_there(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    libraries.prepare(NAMES, HERE)
    capfd.readouterr()
    libraries.prepare(NAMES, HERE)
    afresh(monkeypatch)
    libraries.prepare(NAMES, HERE)
    libraries.library("gemv_bf16", HERE)
    assert capfd.readouterr().err == ""
    assert len(compiled(place)) == SOURCES


def test_one_more_is_built_when_it_is_first_used(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    libraries.prepare(NAMES[:1], HERE)
    capfd.readouterr()
    libraries.library("gemv_int8_bf16_rows", HERE)
    said = capfd.readouterr().err
    assert "compiling 1 kernel library of sm_90 with nvcc (gemv_int8_bf16_rows), once for this machine" in said
    assert len(compiled(place)) == 2


def test_a_failure_names_the_library_and_keeps_the_others(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_compiler(place, failing="decode_attention_one")
    with pytest.raises(KernelError, match="kernel library decode_attention_bf16_128 for sm_90 was not built") as caught:
        libraries.prepare(NAMES, HERE)
    assert "it is no program" in str(caught.value)
    assert "compiled in" not in capfd.readouterr().err
    assert [entry.key.partition("-")[0] for entry in cache.listing()] == ["gemv_bf16"]
    assert libraries.why_not("decode_attention_bf16_128", HERE) == str(caught.value)
    assert libraries.why_not("gemv_bf16", HERE) is None
    runs = len(compiled(place))
    with pytest.raises(KernelError, match="was not built"):
        libraries.library("decode_attention_bf16_128", HERE)
    assert len(compiled(place)) == runs, "a failure is not tried again"


def test_prebuilt_ones_are_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    libraries.export("gemv_bf16", HERE, place / "prebuilt")
    capfd.readouterr()
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(place / "prebuilt"))
    monkeypatch.setenv("NVCC", "no-such-compiler")
    libraries.prepare(NAMES[:1], HERE)
    assert capfd.readouterr().err == ""
    with pytest.raises(KernelError, match="has no decode_attention_bf16_128-sm_90"):
        libraries.prepare(NAMES, HERE)


PROCESS = """
import dataclasses
from accelpatch.device import KNOWN
from accelpatch.kernels.compiling import libraries
libraries.prepare(("gemv_bf16", "decode_attention_bf16_128"), dataclasses.replace(KNOWN["sm_90"], index=0))
print(len(libraries._loaded))
"""


def test_two_processes_at_once_build_each_library_once(place: Path) -> None:
    command = [sys.executable, "-c", PROCESS]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    assert [process.communicate(timeout=240)[0] for process in both] == ["2\n"] * 2
    assert len(compiled(place)) == SOURCES
