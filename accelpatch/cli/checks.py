"""Checks of arguments that need neither torch nor a model, so that errors show at once."""

from __future__ import annotations

import json
from pathlib import Path

from accelpatch.errors import AccelpatchError, LoadError

STATISTICS = "accelpatch_statistics"  # a key in the safetensors header of a file of `accelpatch calibrate`


def text_of(file: Path) -> str:
    """The contents of a text file. Raises AccelpatchError for one that is empty, binary or cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise AccelpatchError(f"{file} cannot be read ({error.strerror}): name a text file") from None
    except UnicodeDecodeError as error:
        raise AccelpatchError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise AccelpatchError(f"{file} is not text: it has a NUL at character {text.index(chr(0))}")
    if not text.strip():
        raise AccelpatchError(f"{file} holds no text; give another one")
    return text


def text_file(file: Path | None) -> Path | None:
    """The value of an option that names a text file. Raises as `text_of`."""
    if file is not None:
        text_of(file)
    return file


def statistics(file: Path | None) -> Path | None:
    """The value of ``--statistics``. Raises LoadError for a file that `accelpatch calibrate` did not write."""
    if file is None:
        return None
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, 100_000_000)))
        valid = STATISTICS in header.get("__metadata__", {})
    except (OSError, ValueError, AttributeError, TypeError):
        valid = False
    if not valid:
        raise LoadError(f"{file} cannot be read as statistics: `accelpatch calibrate` writes such a file")
    return file
