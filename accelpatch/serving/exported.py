"""The export of a model that an engine serves, cached by recipe and model."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from accelpatch import cache
from accelpatch.models import hub
from accelpatch.models.catalog import Source

KIND = "exports"  # in the cache
SAVED, EXPORT = "saved", "export"


def place(source: Source) -> Path | None:
    """Where the files of a model are, fetched if need be; None for the embedded one, which its name says."""
    if source.kind == "hub":
        return hub.snapshot(source.location)
    return None if source.kind == "embedded" else Path(source.location)


def key(files: Iterable[Path], *facts: str) -> str:
    """A name for an export: of the model's files (names, sizes, times of change) and what it is made with."""
    digest = hashlib.sha256()
    for file in sorted(files):
        about = file.stat()
        digest.update(f"{file.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    for fact in facts:
        digest.update(f"{len(fact)} {fact}\n".encode())
    return digest.hexdigest()[:32]


def folder(name: str, quantize: Callable[[Path], object] | None, export: Callable[[Path, Path], object]) -> Path:
    """The folder of an export by its name, made where it is not there. quantize: writes a saved patched model; None
    where `export`, which is called with that folder and the new one, knows its source."""

    def write(partial: Path) -> None:
        if quantize is not None:
            quantize(partial / SAVED)
        export(partial / SAVED, partial / EXPORT)
        shutil.rmtree(partial / SAVED, ignore_errors=True)

    return cache.publish(KIND, name, write) / EXPORT
