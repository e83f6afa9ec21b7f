"""Texts that a causal language model is calibrated on, as windows of token ids.

From a text file, from strings, from the rows of a `datasets` object, or, with none of these, from the model itself: it
continues its first token by sampling. Source of that: Liu et al. 2023, arXiv:2305.17888.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from accelpatch.errors import LoadError
from accelpatch.models.inputs import device_of, text_config

SAMPLES, LENGTH = 16, 256  # windows, and tokens of each
LEAST = 32  # tokens below which the figures of channels say nothing
ROWS = 8  # windows of a batch
COLUMN = "text"
SEED = 0


def windows(
    model: nn.Module, data: Any, tokenizer: Any, samples: int | None = None, length: int | None = None
) -> list[dict[str, Any]]:
    """Batches for `model(**batch)`: up to `samples` windows of `length` tokens, without padding.

    data: a Path or the name of a text file; strings, or rows with a column "text" (a `datasets` object); None: the
    model's own text. Raises LoadError for data that is of another kind, holds too little text, or needs a tokenizer.
    """
    samples, length = (given if given is not None else usual for given, usual in ((samples, SAMPLES), (length, LENGTH)))
    if samples < 1 or length < 1:
        raise LoadError(f"calibrating takes one window of one token at least, not {samples} of {length}")
    most = getattr(text_config(getattr(model, "config", None)), "max_position_embeddings", None)
    length = min(length, most if isinstance(most, int) and most > 0 else LENGTH)
    if data is None:
        if samples * length < LEAST or length < 2:
            raise LoadError(f"{samples} windows of {length} tokens are fewer than the {LEAST} to calibrate on")
        if not hasattr(model, "generate"):
            raise LoadError(f"a {type(model).__name__} writes no text: calibrate on data, and give its statistics")
        return [_batch(ids) for ids in own_text(model, samples, length).split(ROWS)]
    if tokenizer is None:
        raise LoadError("calibrating on text needs the model's tokenizer: accelpatch.calibrate(..., tokenizer=...)")
    device = device_of(model)
    found = list(_windows(texts(data), tokenizer, samples, length))
    tokens = sum(map(len, found))
    if tokens < LEAST:
        raise LoadError(f"the text has {tokens} tokens, and {LEAST} are the least to calibrate on: give more text")
    _check(model, found)
    alike = [torch.stack([one for one in found if len(one) == size]) for size in sorted({*map(len, found)})]
    return [_batch(ids.to(device)) for whole in alike for ids in whole.split(ROWS)]


def _batch(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


def texts(data: Any) -> Iterator[str]:
    """The texts of calibration data. Raises LoadError for what holds none."""
    if isinstance(data, (str, Path)):
        yield _read(Path(data))
        return
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise LoadError(f"calibration data is a text file, strings, or rows with a column {COLUMN!r}, not {type(data)}")
    for row in data:
        text = row.get(COLUMN) if isinstance(row, Mapping) else row
        if not isinstance(text, str):
            raise LoadError(f"a row of the calibration data is no string and has no column {COLUMN!r}: {str(row)[:80]}")
        yield text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise LoadError(
            f"{file} cannot be read ({error.strerror}): name a text file, or give strings in a list"
        ) from error
    except (UnicodeDecodeError, ValueError) as error:
        raise LoadError(f"{file} is not UTF-8 text: {error}") from None


def _windows(found: Iterable[str], tokenizer: Any, samples: int, length: int) -> Iterator[Tensor]:
    """Windows of the texts one after the other; the last may be shorter."""
    left, count = list[int](), 0
    for text in found:
        left += tokenizer(text, add_special_tokens=False)["input_ids"] if text.strip() else []
        while len(left) >= length:
            yield torch.tensor(left[:length], dtype=torch.int64)
            left, count = left[length:], count + 1
            if count == samples:
                return
    if left:
        yield torch.tensor(left, dtype=torch.int64)


def _check(model: nn.Module, found: list[Tensor]) -> None:
    """Raise LoadError for ids that the model does not have, or for windows that are padding alone."""
    config = text_config(getattr(model, "config", None))
    size, pad = getattr(config, "vocab_size", None), getattr(config, "pad_token_id", None)
    ids = torch.cat(found)
    if size and int(ids.max()) >= size:
        raise LoadError(f"the tokenizer gives id {int(ids.max())}, and the model has {size}: give the model's own")
    if len(ids.unique()) == 1:
        what = "padding" if int(ids[0]) == pad else f"the token {int(ids[0])}"
        raise LoadError(f"the text is nothing but {what}: give text as the model will read it")


@torch.no_grad()
def own_text(model: Any, samples: int, length: int) -> Tensor:
    """ids[samples, length] that the model writes, from its first token on, by sampling with a fixed seed."""
    config = text_config(model.config)
    first = next((one for name in ("bos_token_id", "eos_token_id") if (one := _first(config, name)) is not None), 0)
    device = device_of(model)
    ids, own = torch.full((samples, 1), first, dtype=torch.int64, device=device), model.generation_config
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=first, bos_token_id=first)
        try:
            written: Tensor = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length - 1, min_new_tokens=length - 1
            )
        finally:
            model.generation_config = own
    return written


def _first(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) else None
