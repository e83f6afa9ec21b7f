"""Small fixed inputs for a model, in the shapes that generation uses: one token, several, a padded batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LENGTH, BATCH = 12, 3


def sample_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """Inputs for `model(**inputs)`: token ids below the vocabulary's size, pixels, or the model's `dummy_inputs`.

    Always the same for a model of the same configuration. Everything is on the device of the model's first parameter.
    """
    device = next(model.parameters()).device
    kind = getattr(model, "main_input_name", "input_ids")
    if kind == "pixel_values":
        return [{"pixel_values": pixels(model, batch)} for batch in (1, 2)]
    config = getattr(model, "config", None)
    vocabulary = getattr(text_config(config), "vocab_size", None)
    if kind != "input_ids" or not vocabulary:
        dummy: Mapping[str, Any] = getattr(model, "dummy_inputs", {})
        return [{name: value.to(device) if isinstance(value, Tensor) else value for name, value in dummy.items()}]
    batches = [one_batch(vocabulary, 1, 1), one_batch(vocabulary, 1, LENGTH), one_batch(vocabulary, BATCH, LENGTH)]
    batches[2]["attention_mask"][1, : LENGTH // 2] = 0  # left padding, as for generation
    if getattr(config, "is_encoder_decoder", False):
        for batch in batches:
            batch["decoder_input_ids"] = batch["input_ids"].clone()
    else:
        for batch in batches:
            batch["use_cache"] = False
    return [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in batches]


def one_batch(vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    """input_ids[batch, length] spread over the vocabulary, and a mask of ones."""
    places = torch.arange(batch * length, dtype=torch.int64).reshape(batch, length)
    return {"input_ids": (places * 7919 + 17) % vocabulary, "attention_mask": torch.ones_like(places)}


def pixels(model: nn.Module, batch: int) -> Tensor:
    """Seeded noise [batch, channels, height, width] in the model's dtype and image size."""
    config, first = model.config, next(model.parameters())
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(batch, getattr(config, "num_channels", 3), height, width, generator=generator)
    return noise.to(first.device, first.dtype)


def text_config(config: Any) -> Any:
    """The part of a configuration that has the vocabulary."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
