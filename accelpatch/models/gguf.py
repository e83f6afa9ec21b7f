"""GGUF files beside transformers: what is looked at before it reads one, and undone behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accelpatch.errors import LoadError

TOKENIZER, BEGINNING = b"tokenizer.ggml.model", 1 << 20


def check(path: Path) -> None:
    """Raise LoadError for a file that does not begin as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} does not begin as a GGUF file does: fetch it again")


def forget_quantizer(model: Any) -> None:
    """Remove the GGUF quantizer from a model whose weights are plain floats now, so that transformers can save it."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def has_tokenizer(path: Path) -> bool:
    """Whether a file's metadata names a tokenizer, which it does before the words."""
    with path.open("rb") as file:
        return TOKENIZER in file.read(BEGINNING)


def device_map_of(device: str | torch.device) -> dict[str, torch.device] | None:
    """The device_map that puts a whole model on a device; None for the CPU."""
    return None if torch.device(device).type == "cpu" else {"": torch.device(device)}
