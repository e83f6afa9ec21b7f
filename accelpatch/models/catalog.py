"""The models that accelpatch knows by a short name: their source and their configuration.

Configurations, in configs/, are copies of the models' ``config.json`` in transformers 5's keys, so that planning needs
no network.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelpatch.errors import LoadError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class CatalogEntry:
    """A known model. config: its transformers configuration, with ``model_type`` and ``dtype``."""

    name: str
    hub_name: str
    config: Mapping[str, Any]
    embedded: bool = False  # comes from the package index, not from the hub


@dataclass(frozen=True)
class Source:
    """Where a model comes from. kind: "embedded", "hub", "folder" or "gguf". location: hub name or path.

    from_folder: whether a GGUF file was given by its folder, whose configuration and tokenizer are then the file's.
    """

    kind: str
    name: str
    location: str
    config: dict[str, Any] | None = None
    from_folder: bool = False


def _entries() -> dict[str, CatalogEntry]:
    """Of each file in configs/, by its name without the ending."""
    files = sorted((Path(__file__).parent / "configs").glob("*.json"))
    return {file.stem: CatalogEntry(file.stem, **json.loads(file.read_text(encoding="utf-8"))) for file in files}


CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(_entries())


def resolve(name: str) -> Source:
    """Find the source of a model: a short name of the catalog, else a path, else a name on the hub.

    For a folder with the name of a catalog entry write a path: ``./gpt2``. Raises LoadError for a path that does not
    exist, a file that is not GGUF, and a name that looks like a misspelt short name.
    """
    if entry := CATALOG.get(name.lower()):
        location = entry.name if entry.embedded else entry.hub_name
        return Source("embedded" if entry.embedded else "hub", entry.name, location, dict(entry.config))
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(name, path)
    if name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", ".safetensors", *_PICKLES)):
        raise LoadError(f"{name}: no such file or folder")
    if not _HUB_NAME.fullmatch(name):
        raise LoadError(
            f"{name!r} names no model: give a short name ({', '.join(CATALOG)}), a folder, a "
            ".gguf file or a name on the hub (owner/name)"
        )
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.75)):
        raise LoadError(
            f"no model is called {name!r}; did you mean {close[0]!r}? Known short names: {', '.join(CATALOG)}"
        )
    known = next((entry.config for entry in CATALOG.values() if entry.hub_name == name), None)
    return Source("hub", name, name, None if known is None else dict(known))


def _local(name: str, path: Path) -> Source:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 and not any((path / name).is_file() for name in _WEIGHTS):
            return Source("gguf", name, str(ggufs[0].absolute()), from_folder=True)
        return Source("folder", name, str(path.absolute()))
    if path.suffix == ".gguf":
        return Source("gguf", name, str(path.absolute()))
    if path.suffix in _PICKLES:
        raise LoadError(pickle_refusal(str(path)))
    raise LoadError(f"{name} is a file: give the folder that holds config.json and the weights, or a .gguf file")


def pickle_refusal(place: str) -> str:
    """The error message for a checkpoint in a format that can run code when loaded."""
    return (
        f"{place} holds pickled weights, which can run code while they load, so they are refused. Convert them in an "
        "environment that you would risk: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) "
        "writes safetensors"
    )
