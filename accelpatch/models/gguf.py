"""GGUF files by transformers: configuration and tokenizer, the model unpacked to floats, and one as it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from accelpatch.errors import LoadError
from accelpatch.models import checkpoint
from accelpatch.models.checkpoint import Progress
from accelpatch.models.guard import explained, no_bar, quiet

TOKENIZER, BEGINNING = b"tokenizer.ggml.model", 1 << 20


def config(path: Path) -> Any:
    """The configuration in a file's metadata."""
    with explained(f"{path} is no GGUF file that transformers can read"), quiet():
        return transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)


def unpacked(path: Path, dtype: str | torch.dtype, device: str | torch.device, progress: Progress) -> Any:
    """The model with all weights as floats. Raises LoadError, as the other functions here do."""
    check(path)
    options: dict[str, Any] = {}
    # Newer versions would keep the blocks and fetch kernels for them; the oldest always unpacks.
    if (gguf_config := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = gguf_config(dequantize=True)
    progress("unpacking", 0, 1)
    with explained(f"{path} is damaged, or of a kind that transformers cannot read"), quiet(), no_bar():
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            device_map=device_map_of(device),
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    checkpoint.check_complete(str(path), info)
    _forget_quantizer(model)
    progress("unpacking", 1, 1)
    return model.eval()


def as_stored(
    path: Path, config: Any, model_class: Any, quantization: Any, floats: Mapping[str, torch.Tensor],
    dtype: str | torch.dtype, device: str | torch.device, progress: Progress,
) -> Any:  # fmt: skip
    """The model whose quantised weights `quantization` reads from the file, as floats in `dtype` ("auto": float32)."""
    progress("loading", 0, 1)
    with explained(f"{path} cannot be loaded"), quiet():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(floats),
            dtype=torch.float32 if dtype == "auto" else dtype,
            device_map=device_map_of(device),
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported in info, which check_complete turns into an error
            output_loading_info=True,
            quantization_config=quantization,
        )
    checkpoint.check_complete(str(path), info)
    progress("loading", 1, 1)
    return model.eval()


def check(path: Path) -> None:
    """Raise LoadError for a file that does not begin as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} does not begin as a GGUF file does: fetch it again")


def _forget_quantizer(model: Any) -> None:
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


def tokenizer(path: Path, progress: Progress) -> Any:
    """The tokenizer in a file's metadata."""
    check(path)
    progress("reading the tokenizer", 0, 1)
    with explained(f"{path} has no tokenizer that transformers can read"), quiet():
        found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    progress("reading the tokenizer", 1, 1)
    return found


def device_map_of(device: str | torch.device) -> dict[str, torch.device] | None:
    """The device_map that puts a whole model on a device; None for the CPU."""
    return None if torch.device(device).type == "cpu" else {"": torch.device(device)}
