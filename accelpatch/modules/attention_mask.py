"""The masks of this package's attention function, as transformers asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from accelpatch.modules.attention_settings import original_mask

PART = 1 << 26  # elements of a mask that are made at a time


def attention_mask(*args: Any, **given: Any) -> Any:
    """transformers' mask interface: the mask of attention_forward; arguments as of transformers' sdpa_mask."""
    original = None if torch.compiler.is_compiling() else original_mask(given.get("config"))
    return (_mask if original is None else original)(*args, **given)


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, device: Any = "cpu", **options: Any,
) -> Tensor | None:  # fmt: skip
    given = {
        "batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "local_size": local_size, "device": device, **options,
        "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False,
    }  # fmt: skip
    if _unread(q_length, q_offset, device):
        return sdpa_mask(q_length=q_length, q_offset=q_offset, **given)
    padded = attention_mask is not None and not bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())
    whole = not padded and (attention_mask is None or attention_mask.shape[-1] >= kv_length + kv_offset)
    last = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    # as many keys as a chunk may lie in two of them
    near = local_size is None or kv_length < local_size
    if whole and last and allow_is_causal_skip and near:
        plain = q_length in (1, kv_length)
        return None if plain else torch.empty(1, 1, 0, 0, dtype=torch.int32, device=device)
    if whole and allow_is_bidirectional_skip and near:
        return None
    ranges = _ranges(q_length, q_offset, given)
    if ranges is None:
        return sdpa_mask(q_length=q_length, q_offset=q_offset, **given)
    if whole and last and local_size is not None and _is_window(ranges, kv_length, local_size):
        return torch.empty(1, 1, 0, local_size, dtype=torch.int32, device=device)
    return ranges


def _unread(q_length: int, q_offset: Any, device: Any) -> bool:
    """Whether no value of a mask may be read, since the call is compiled, captured in a graph, or will be: a step over
    a static cache warms up the kernels that its capture launches."""
    step = q_length == 1 and isinstance(q_offset, Tensor)
    if step or torch.compiler.is_compiling():
        return True
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ranges(q_length: int, q_offset: Any, given: dict[str, Any]) -> Tensor | None:
    """int32 [B, 1, L, 2]: from the first key that each query sees to the one after the last; None where a query sees
    keys with holes between them, or heads differ."""
    rows = max(1, PART // max(1, given["batch_size"] * given["kv_length"]))
    keys = torch.arange(given["kv_length"], device=given["device"])
    parts, whole = [], []
    for start in range(0, q_length, rows):
        seen = sdpa_mask(q_length=min(rows, q_length - start), q_offset=q_offset + start, **given)
        if seen.shape[1] != 1:
            return None
        low = seen.to(torch.uint8).argmax(-1)
        high = low + seen.sum(-1)
        whole.append((seen == (keys >= low[..., None]) & (keys < high[..., None])).all())
        parts.append(torch.stack((low, high), -1).to(torch.int32))
    if not parts or not bool(torch.stack(whole).all()):
        return None
    return torch.cat(parts, 2)


def _is_window(ranges: Tensor, keys: int, window: int) -> bool:
    """Whether the ranges are those of a causal window, the last query being the last key."""
    high = torch.arange(keys - ranges.shape[2], keys, device=ranges.device) + 1
    due = torch.stack(((high - window).clamp(min=0), high), -1)
    return bool((ranges == due).all())
