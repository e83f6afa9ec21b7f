"""Calibration inputs of models that generate no text: batches, pictures or sound, or noise made from a configuration.

The noise has the right shapes (random ids, pictures or sound). It shows how large activations get on such input, and
says less about real input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import FOREIGN, LoadError
from accelpatch.models.inputs import device_of, sample_inputs, text_config

SIGNALS = ("pixel_values", "input_values", "input_features")
SAMPLES, LENGTH, TEXTS = 16, 128, 8

Batch = dict[str, Any]


def batches(model: nn.Module, data: Any, processor: Any, samples: int | None) -> list[Batch] | None:
    """Batches for `model(**batch)`; None where `data` is text.

    data: mappings of tensors, each the arguments of one call; pictures or arrays of sound, for the model's processor;
    None: made of the configuration. Raises LoadError where none can be made, or the model takes none.
    """
    most = samples or SAMPLES
    if data is None:
        return _made(model)
    rows = list(islice(data, most)) if isinstance(data, Iterable) and not isinstance(data, (str, Mapping)) else []
    if rows and all(isinstance(row, Mapping) and _tensors(row) for row in rows):
        device = device_of(model)
        return [{name: one.to(device) if isinstance(one, Tensor) else one for name, one in row.items()} for row in rows]
    names: Sequence[str] = getattr(processor, "model_input_names", ())
    if not rows or not any(name in names for name in SIGNALS):
        return None
    return list(_processed(model, rows, processor))


def _tensors(row: Mapping[str, Any]) -> bool:
    return any(isinstance(one, Tensor) for one in row.values())


def _processed(model: nn.Module, rows: Sequence[Any], processor: Any) -> Iterator[Batch]:
    device, dtype = device_of(model), getattr(model, "dtype", torch.float32)
    for row in rows:
        try:
            made = processor(row, return_tensors="pt")
        except FOREIGN as error:
            raise LoadError(f"{type(processor).__name__} takes no {type(row).__name__} of the data: {error}") from error
        yield {name: one.to(device, dtype) if one.is_floating_point() else one.to(device) for name, one in made.items()}


def _made(model: Any) -> list[Batch]:
    """Noise in the shapes that the model takes."""
    device = device_of(model)
    size = getattr(text_config(getattr(model, "config", None)), "vocab_size", None)
    if getattr(model, "main_input_name", "") == "input_ids" and isinstance(size, int):
        # RoBERTa's positions begin at 2.
        most = getattr(text_config(model.config), "max_position_embeddings", LENGTH) - 2
        ids = torch.randint(size, (TEXTS, max(1, min(LENGTH, most))), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}]
    for found in sample_inputs(model):
        try:
            with torch.no_grad():
                model(**found[0])
        except FOREIGN:
            continue
        return [dict(one) for one in found]
    raise LoadError(
        f"no inputs can be made for a {type(model).__name__} to calibrate on: give data, such as "
        "[{'pixel_values': tensor}, ...]"
    )
