"""Small fixed sample inputs for a model, made from its configuration, in the shapes that generation uses.

The kind of input (token ids, images, audio) is taken from the model's main_input_name and its forward's signature.
Where several forms are possible all are returned, the most likely one first; use the first that the model accepts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

LENGTH, BATCH = 12, 3
SOUND, FRAMES, CHANNELS = 16000, 64, 3
Sample = dict[str, Any]
# Argument names of images and audio in a forward, where they are not the model's main input.
SIGNALS = ("pixel_values", "input_features", "input_values", "pixel_values_videos")


def sample_inputs(model: nn.Module) -> list[list[Sample]]:
    """Candidates, each a list of keyword arguments for `model(**inputs)`: one token, several tokens and a padded batch,
    or two batches of images or audio.

    Deterministic; on the device of the first tensor that is in memory. Empty where the kind of input is unknown.
    """
    device = device_of(model)
    found = [[_accepted(model, sample) for sample in candidate] for candidate in _candidates(model)]
    return [
        [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in sample.items()} for sample in candidate]
        for candidate in found
    ]


def device_of(model: nn.Module) -> torch.device:
    """The device of the first of a model's tensors that is in memory (those on meta are offloaded)."""
    devices = (tensor.device for tensor in chain(model.parameters(), model.buffers()) if not tensor.is_meta)
    return next(devices, torch.device("cpu"))


def _candidates(model: Any) -> Iterator[list[Sample]]:
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    vocabulary = _count(text_config(config), "vocab_size")
    tokens = token_batches(config, vocabulary) if vocabulary else []
    if main == "input_ids" and tokens:
        yield tokens
    names = dict.fromkeys([main, *(name for name in SIGNALS if name in _parameters(model))])
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    signals = [(name, shape) for name in names if name in SIGNALS for shape in _shapes(config, name)]
    for name, shape in signals:
        yield [{name: noise((batch, *shape), dtype)} | _decoder(config, vocabulary, batch) for batch in (1, 2)]
    if tokens:
        for name, shape in signals:
            yield [{name: noise((len(one["input_ids"]), *shape), dtype)} | one for one in tokens]
    dummy: Mapping[str, Any] = getattr(model, "dummy_inputs", {})
    if main in dummy:
        yield [dict(dummy)]


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(model).forward).parameters


def _accepted(model: nn.Module, sample: Sample) -> Sample:
    """Those of the arguments that the model's forward accepts, itself or as **kwargs."""
    known = _parameters(model)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        return sample
    return {name: value for name, value in sample.items() if name in known}


def token_batches(config: Any, vocabulary: int) -> list[Sample]:
    """input_ids and attention_mask of [1, 1], [1, length] and [3, length], the last with one row padded on the left."""
    length = min(LENGTH, _count(text_config(config), "max_position_embeddings") or LENGTH)
    batches = [one_batch(vocabulary, 1, 1), one_batch(vocabulary, 1, length), one_batch(vocabulary, BATCH, length)]
    batches[2]["attention_mask"][1, : length // 2] = 0  # left padding, as for generation
    for batch in batches:
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = batch["input_ids"].clone()
        else:
            batch["use_cache"] = False
    return batches


def one_batch(vocabulary: int, batch: int, length: int) -> Sample:
    """input_ids[batch, length] spread over the vocabulary, and an attention_mask of ones."""
    places = torch.arange(batch * length, dtype=torch.int64).reshape(batch, length)
    return {"input_ids": (places * 7919 + 17) % vocabulary, "attention_mask": torch.ones_like(places)}


def _decoder(config: Any, vocabulary: int | None, batch: int) -> Sample:
    """The decoder's inputs for an encoder-decoder that takes images or audio."""
    if not getattr(config, "is_encoder_decoder", False) or not vocabulary:
        return {}
    return {"decoder_input_ids": one_batch(vocabulary, batch, LENGTH if batch > 1 else 1)["input_ids"]}


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal noise with a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _shapes(config: Any, name: str) -> list[tuple[int, ...]]:
    """Possible shapes, without the batch dimension, of the input ``name`` for a configuration."""
    channels, bins = _count(config, "num_channels", "in_channels") or CHANNELS, _count(config, "num_mel_bins")
    if name.startswith("pixel_values"):
        picture = (channels, *_size(config))
        frames = _count(config, "num_frames")
        return [(frames, *picture)] if frames else [picture]
    if name == "input_values":
        length, channels = _count(config, "max_length"), _count(config, "audio_channels") or 1
        spectrum = [(length, bins)] if length and bins else []
        return [*spectrum, (SOUND,), (channels, SOUND)]
    positions = _count(config, "max_source_positions")
    whisper = [(bins, 2 * positions)] if bins and positions else []
    width = _count(config, "input_feat_per_channel", "feature_projection_input_dim") or bins
    return [*whisper, *([(FRAMES, width)] if width else [])]


def _size(config: Any) -> tuple[int, int]:
    """(height, width) of an image."""
    sizes = (getattr(part, "image_size", None) for part in _parts(config))
    size = next((one for one in sizes if one), 224)
    if isinstance(size, Mapping):
        size = (size.get("height", 224), size.get("width", 224))
    return (size[0], size[1]) if isinstance(size, (tuple, list)) and len(size) == 2 else (_one(size), _one(size))


def _one(size: Any) -> int:
    return size if isinstance(size, int) and size > 0 else 224


def _count(config: Any, *names: str) -> int | None:
    """The first of these names with a positive number in a configuration or in its sub-configurations."""
    values = (getattr(part, name, None) for name in names for part in _parts(config))
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _parts(config: Any) -> list[Any]:
    """A configuration and its sub-configurations."""
    return [config, *(part for part in vars(config).values() if hasattr(part, "model_type"))] if config else []


def text_config(config: Any) -> Any:
    """The sub-configuration with the vocabulary size."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
