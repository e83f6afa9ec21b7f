"""Saves patched models, and looks at the bytes of what was saved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import accelpatch
from accelpatch.checkpoints import card
from tests.support.tiny import full_batch


def saved(model: Any, recipe: Any, folder: Path, **options: Any) -> Any:
    """The model, patched and saved."""
    accelpatch.patch(model, recipe)
    model.save_pretrained(folder, **options)
    return model


def opened(folder: Path, **options: Any) -> Any:
    """A folder's model, loaded by transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Logits of three prompts, without padding."""
    found: Tensor = model(**full_batch()).logits
    return found


def digests(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Name -> SHA-256 of the files in a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob(pattern)
        if path.is_file() and not card.is_ours(path)  # which has the folder's name
    }


def weights(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of its weight files."""
    return digests(folder, "*.safetensors*")


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begin."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), 8 + size


def rewritten(file: Path, changed: dict[str, Any]) -> None:
    """Write another header, the data as they are."""
    data, (_, start) = file.read_bytes(), header(file)
    text = json.dumps(changed).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
