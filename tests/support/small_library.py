"""A kernel library of two small sources, a cache of its own, and a compiler that writes down each run of it."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from accelpatch.device import Device
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.libraries import Target

DEVICE = Device("cpu", "cpu", "x86-64", "a CPU", 1 << 30, 1)
SOURCE = 'extern "C" int answer() { return ANSWER; }\n'
COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def small(folder: Path) -> Target:
    return Target(str(folder), {"one.cpp": (), "two.cpp": ()}, ("g++",), ("-fPIC",), ("-shared",), "here")


def write_compiler(place: Path, last: str) -> None:
    """A compiler that logs every file that it compiles, then does `last`."""
    script = place / "compiler"
    log = f'case " $* " in *" -c "*) echo "$*" >> {place}/log;; esac'
    script.write_text(f"#!/bin/sh\n{log}\n{last}\n")
    script.chmod(0o755)


def compiled(place: Path) -> int:
    log = place / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def entry(place: Path) -> Path:
    [folder] = [path for path in (place / "cache/kernels").iterdir() if not path.name.startswith(".")]
    return folder


def afresh(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})
    return libraries.library("small", DEVICE)
