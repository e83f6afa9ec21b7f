"""Sizes and constants of an attention layer, as its kernels take them."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelpatch.kernels.spec import Described, Spec

MAX_NEW_TOKENS = 8  # new tokens of a row in a decode step


class Zeros:
    """int32 counters and exchange buffers of kernels: zero before and after each launch.

    All layers and launches of a model share them, so a model may run on one stream at a time only: two launches at once
    would corrupt each other's counters, and all later ones. Memory is never freed or moved, because captured launches
    hold its address; where more is needed, a larger buffer is added.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def first(self, count: int, device: torch.device) -> Tensor:
        """The first `count` of the int32 zeros on a device."""
        fitting = [zeros for zeros in self.buffers if zeros.device == device and len(zeros) >= count]
        if not fitting:
            fitting = [torch.zeros(count, dtype=torch.int32, device=device)]
            self.buffers += fitting
        return fitting[-1][:count]


@dataclass(frozen=True, eq=False)
class AttentionShape(Described):
    """Sizes and constants of one attention layer. inv_freq[R / 2], R <= D, and q_norm, k_norm[D] (or None) on the
    device.

    size: D, the head size. scaling: of the scores. rope_scaling: of cosines and sines. window, softcap: 0 for none.
    plus_one: the norms multiply by 1 + weight (Gemma). sinks[Hq]: float32 on the device, a score of each head that has
    no key (GPT-OSS); None for none.
    """

    heads: int
    kv_heads: int
    size: int
    scaling: float
    inv_freq: Tensor
    rope_scaling: float = 1.0
    window: int = 0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    softcap: float = 0.0
    plus_one: bool = False
    sinks: Tensor | None = None
    memory: Zeros = field(default_factory=Zeros, repr=False)

    @functools.cached_property
    def facts(self) -> Hashable:
        """Numbers and sizes of heads, and the dtype of the frequencies."""
        return self.heads, self.kv_heads, self.size, self.rotary_dim, self.inv_freq.dtype

    @property
    def columns(self) -> int:
        """Columns of qkv."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def rotary_dim(self) -> int:
        """R, the number of leading columns of a head that get the rotary embedding."""
        return 2 * self.inv_freq.shape[0]


def needs_mask(spec: Spec) -> bool:
    """Whether torch needs a mask for a call of flash_attention."""
    options, length = spec.options, spec.sizes["L"]
    if options["ranges"] or options["bias"] is not None:
        return True
    if not options["causal"] or length == 1:
        return False
    return bool(options["window"]) or length != spec.sizes["S"]
