"""Checks where a command's result goes before anything is loaded, by trying it on the file system.

Imports neither torch nor transformers, so that the command line can check first.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError, SaveError
from accelpatch.models import checkpoint

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FULL = (errno.ENOSPC, errno.EDQUOT)


def check_folder(folder: Path, need: int = 0) -> None:
    """Raise SaveError where `folder` cannot be made or written. need: bytes that will be written, as far as is
    known."""
    real = Path(os.path.realpath(folder))
    if real.exists() and not real.is_dir():
        raise SaveError(f"{folder} is a file: name a folder")
    _check_writable(folder, need, "name another folder")


def check_file(file: Path, need: int = 0) -> None:
    """Raise SaveError where `file` cannot be written: it is a folder, or its folder is missing."""
    if file.is_dir():
        raise SaveError(f"{file} is a folder: name a file")
    if not file.resolve().parent.exists():
        raise SaveError(f"{file} cannot be written: there is no folder {file.parent}; make it, or name another file")
    _check_writable(file, need, "name another file")


def check_empty(folder: Path) -> None:
    """Raise SaveError for a folder that holds anything."""
    real = Path(os.path.realpath(folder))
    if real.is_dir() and any(real.iterdir()):
        raise SaveError(f"{folder} is not empty: name a new folder")


def check_new(folder: Path, overwrite: bool) -> None:
    """Raise SaveError for a folder with files that must not be replaced. An empty folder, or none, is accepted."""
    real = Path(os.path.realpath(folder))
    if not real.is_dir() or not any(real.iterdir()):
        return
    if not is_own(real):
        raise SaveError(f"{folder} is there, and holds no model that accelpatch saved: name another folder")
    if not overwrite:
        raise SaveError(
            f"{folder} holds a model that accelpatch saved: give --overwrite (overwrite=True) to replace it, or name a "
            "new folder"
        )


def is_own(folder: Path) -> bool:
    """Whether a folder holds a patched model that accelpatch saved."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and checkpoint.quantization_method(config) == checkpoint.OWN


def own_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model that accelpatch saved. Raises LoadError for any other folder."""
    checkpoint.read_config(folder, foreign=True)  # raises for what is no checkpoint
    config = checkpoint.read_json(folder / "config.json")
    method = checkpoint.quantization_method(config)
    if method is None:
        raise LoadError(f"{folder} holds float weights: quantise them first, with `accelpatch quantize`")
    if method != checkpoint.OWN:
        raise LoadError(f"{folder} is {method} already: accelpatch.load it and save_pretrained makes it accelpatch's")
    return config


def unfinished_folder(folder: Path) -> Path:
    """Where the finished weights of an interrupted quantisation into `folder` lie."""
    return folder.resolve().with_name(f".{folder.resolve().name}.quantising")


def unfinished(folder: Path) -> int:
    """How many finished weights are in that folder."""
    place = unfinished_folder(folder)
    return sum(1 for _ in place.glob("*.safetensors")) if place.is_dir() else 0


def shard_size(given: int | str) -> int:
    """Bytes of a size such as 5000000000, "5GB" or "512MiB". Raises SaveError."""
    if isinstance(given, int) and given > 0:
        return given
    text = str(given).strip().upper()
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    if not unit or not number.isdecimal() or not int(number):
        raise SaveError(f"max_shard_size is {given!r}: give bytes, or a number with one of {', '.join(UNITS)}")
    return int(number) * UNITS[unit]


def _check_writable(place: Path, need: int, advice: str) -> None:
    """Try to write: permissions do not say what a file system accepts (/proc, say, or one mounted read-only)."""
    target = Path(os.path.realpath(place))
    try:
        parent = next((one for one in target.parents if one.exists()), target)
        tempfile.TemporaryFile(dir=parent).close()  # it has no name, so that a kill leaves no file
    except OSError as error:
        why = error.strerror or error
        more = "free some space there" if error.errno in FULL else advice
        raise SaveError(f"{place} cannot be written: {parent} takes no new files ({why}); {more}") from None
    free = shutil.disk_usage(parent).free
    if need > free:
        raise SaveError(
            f"{place} cannot be written: it takes {need / 1e9:.2f} GB, and {parent} has {free / 1e9:.2f} GB free; "
            f"free some space there, or {advice}"
        )
