"""GGUF files around transformers' reader: what is checked before it reads one, and corrected after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from accelpatch.errors import LoadError
from accelpatch.models import checkpoint, gguf_rotary
from accelpatch.models.configuration import model_class, native
from accelpatch.models.gguf_header import BESIDE, Metadata, read_header
from accelpatch.models.gguf_keys import OWN, TIED
from accelpatch.models.guard import explained
from accelpatch.models.precheck import check_gguf


def folder_configuration(path: Path) -> Any:
    """The config.json in a file's folder. Raises LoadError where it leaves out that the file scales its frequencies."""
    check_gguf(path)
    config = native(checkpoint.read_config(path.parent), str(path.parent))
    config.dtype = None  # that of the float checkpoint, to which unpacked weights would be rounded
    gguf_rotary.check_scaled(config, Metadata(path, read_header(path)))
    return config


def check_places(config: Any, path: Path) -> None:
    """Raise LoadError where the model of a configuration has no place for all of a file's tensors.

    transformers leaves out those that it finds no name for, such as biases of an architecture that has none there.
    """
    file = Metadata(path, read_header(path))
    left_out = gguf_rotary.TENSORS + (("output.weight",) if file.of(TIED) else ())
    if file.of(OWN):
        return  # transformers' newer reader says so itself, and leaves blocks of draft tokens out on purpose
    values = sum(math.prod(shape) for name, _, shape in file.header.tensors if name not in left_out)
    with explained(f"{path}: no model can be made from its configuration"), torch.device("meta"):
        model = model_class(config)._from_config(config)
    named = set(model.state_dict())
    places = sum(one.numel() for one in model.parameters())
    places += sum(one.numel() for name, one in model.named_buffers() if name in named)
    if values > places:
        raise LoadError(f"{path}: its tensors hold {values} values, and {type(model).__name__} has places for "
                        f"{places}: transformers would leave the others out: {BESIDE}, or give the float "
                        "checkpoint")  # fmt: skip


def forget_quantizer(model: Any) -> None:
    """Remove the GGUF quantizer from a model whose weights are plain floats now, so that transformers can save it."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
