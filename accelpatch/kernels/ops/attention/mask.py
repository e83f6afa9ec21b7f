"""Attention masks for implementations that take no ranges: which keys a query sees, and which keys any query sees.

As in flash_attention.py a query of row b sees the keys low <= j < high of ranges[b, i] = (low, high).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a contiguous last dimension; copied only where needed."""
    return tuple(one if one.stride(-1) == 1 else one.contiguous() for one in tensors)


def by_token(y: Tensor) -> Tensor:
    """[B, L, H, D] of y[B, H, L, D], with the strides of a new tensor even where a size is 1."""
    b, heads, length, size = y.shape
    return y.transpose(1, 2).reshape(-1).view(b, length, heads, size)


def without_hidden(
    length: int, k: Tensor, v: Tensor, bias: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of k, v and bias without the keys that precede the windows of all of the last `length` queries."""
    first = k.shape[2] - length + 1 - window
    if not window or first <= 0:
        return k, v, bias
    return k[:, :, first:], v[:, :, first:], None if bias is None else bias[..., first:]


def visible(length: int, keys: int, ranges: Tensor | None, causal: bool, window: int, like: Tensor) -> Tensor | None:
    """Boolean [B or 1, 1, L, S]: which keys a query sees, on the device of `like`; None where each one sees all."""
    if ranges is None and not causal:
        return None
    if ranges is None:
        high = torch.arange(1 + keys - length, keys + 1, device=like.device)[None]
        low = torch.zeros_like(high)
    else:
        low, high = ranges.unbind(-1)
    if window:
        low = torch.maximum(low, high - window)
    at = torch.arange(keys, device=like.device)
    return ((at >= low[..., None]) & (at < high[..., None]))[:, None]


def combined(seen: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as torch takes it, [B or 1, H or 1, L or 1, S]: bool, or of `dtype` and added to the scores."""
    if bias is None or seen is None:
        return seen if bias is None else bias if bias.dtype == torch.bool else bias.to(dtype)
    if bias.dtype == torch.bool:
        return seen & bias
    return torch.where(seen, bias.to(dtype), float("-inf"))


def shown(mask: Tensor) -> Tensor:
    """The mask as booleans, true where a key is visible."""
    return mask if mask.dtype == torch.bool else ~mask.isneginf()


def emptied(k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of k and v with zeros for the keys that no query sees: 0 * NaN would spread. seen: as `shown`."""
    anywhere = seen.any(2)  # [B or 1, Hq or 1, S]
    if anywhere.shape[1] > k.shape[1]:
        anywhere = anywhere.unflatten(1, (k.shape[1], -1)).any(2)
    hidden = ~anywhere[..., None]
    return k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)


def texts_of(ranges: Tensor) -> list[int] | None:
    """Lengths of the texts that are packed in one row, if ranges[1, L, 2] say that each token sees itself and the
    tokens before it in its own text. None for any other mask. Waits for the device.
    """
    if ranges.shape[0] != 1:
        return None
    low, high = ranges[0].unbind(-1)
    place = torch.arange(len(low), dtype=low.dtype, device=low.device)
    first = low == place
    begin = torch.where(first, place, 0).cummax(0).values
    if not bool(((high == place + 1) & (low == begin)).all()):
        return None
    starts = [*first.nonzero()[:, 0].tolist(), len(low)]
    return [stop - start for start, stop in itertools.pairwise(starts)]
