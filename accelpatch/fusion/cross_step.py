"""What fused decoder layers of an encoder-decoder read in a step of one token a row, besides their own weights.

The runtime puts a CrossStep on the cache that it gives to the model, whose layers find it there. Attention to the
encoder's tokens runs by the kernel of decode attention, which appends a token to a cache and attends to it and those
before: the token appended is the last one of the encoder that the mask shows, with the keys and values that the cache
has there already. So the cache is read as it is, and stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

STEP = "accelpatch_step"  # attribute of a cache


class CrossCache:
    """Keys and values of the encoder's tokens in all layers, states[layers, 2, B, H, S, D].

    mask[B, S] int64: 1 where tokens are; None where the model is given none, or one of another shape. ends[B]: the last
    token of each row that it shows. ones, last: the same for a model that hides no token.
    """

    def __init__(self, states: Tensor, mask: Tensor | None):
        rows, length = states.shape[2], states.shape[4]
        self.states, self.mask = states, mask
        self.ones = torch.ones(rows, length, dtype=torch.int64, device=states.device)
        self.last = torch.full((rows,), length - 1, dtype=torch.int64, device=states.device)
        self.ends = self.last.clone()
        self._rows = torch.arange(rows, device=states.device)

    def show(self) -> None:
        """Take the mask's present values."""
        if self.mask is not None:
            places = torch.arange(self.mask.shape[1], device=self.mask.device)
            self.ends.copy_(torch.where(self.mask.ne(0), places, 0).amax(1))

    def key_and_value(self, masked: bool) -> Tensor:
        """Those [B, layers, 2, H, D] of the last token that is shown. masked: whether the model hides any."""
        return self.states[:, :, self._rows, :, self.ends if masked else self.last]


@dataclass(eq=False)
class CrossStep:
    """One run of a step. positions[B, 1], slot[B], mask[B, L]: as of decode attention. own: has the layers of the cache
    of the decoder's tokens. ran: gets the places of the layers that run fused."""

    positions: Tensor
    slot: Tensor
    mask: Tensor
    own: Any
    cross: CrossCache
    ran: set[int] = field(default_factory=set)
    _appended: dict[bool, Tensor] = field(default_factory=dict)
    _biases: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def appended(self, masked: bool) -> Tensor:
        """Key and value [B, layers, 2, H, D] of the token that is appended, gathered once a run. masked: whether the
        model hides tokens of the encoder."""
        if masked not in self._appended:
            self._appended[masked] = self.cross.key_and_value(masked)
        return self._appended[masked]

    def biased(self, bias: Tensor, mask: Tensor | None) -> Tensor:
        """`biased`, made once a run."""
        if id(bias) not in self._biases:
            made = biased(bias, mask).contiguous()
            # Referenced here, so that no other tensors get their ids.
            self._biases[id(bias)] = self._biases[id(made)] = (made, bias)
        return self._biases[id(bias)][0]


def biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """bias[1 or B, H, 1, L] where the mask shows a token, the lowest number elsewhere. mask[B, 1, 1, L]: bool or
    additive."""
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def step_of(cache: Any) -> CrossStep | None:
    """The step of which a cache is part, or None."""
    found: CrossStep | None = getattr(cache, STEP, None)
    return found


def filled(cache: Any, place: int) -> bool:
    """Whether a cache is transformers' own of an encoder-decoder, one that grows, and a layer's keys and values of the
    encoder are there."""
    if type(cache) is not EncoderDecoderCache or not cache.is_updated.get(place):
        return False
    return type(cache.self_attention_cache) is type(cache.cross_attention_cache) is DynamicCache
