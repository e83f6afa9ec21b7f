"""What the layers of one call share, and running a layer's own module within it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.fusion.cache_name import layer_argument
from accelpatch.fusion.decoder import layers_of
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.rotary import by_axes, one_rope
from accelpatch.fusion.spread import rotary_on
from accelpatch.modules.paged_setting import implementation

#: window in slots (0: none) -> boolean mask [B or 1, 1, T, keys] of the keys that each token attends to; None, where a
#: layer is whole, for plain causal masking
Visible = Callable[[int], Tensor | None]


class Call(Protocol):
    """Positions[B, T], masks and the KV cache of one call, which runs layer after layer over M = B T rows."""

    positions: Tensor

    def on(self, device: torch.device) -> Call:
        """This call for layers on a device, whose tensors lie there."""

    def form(self, layer: Any) -> Any:
        """The form of a FusedLayer that this call runs: with or without flags between its kernels."""

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """Attention of the FusedLayer at `place`: qkv[M, (Hq + 2 Hkv) D] -> [M, Hq D]; fills the cache."""

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """The layer at `place` by its module: x[M, K] -> [M, K]; fills the cache."""


class Movable:
    """Base of calls, dataclasses whose tensors all lie on one device."""

    positions: Tensor

    def on(self, device: torch.device) -> Self:
        """As in Call."""
        if self.positions.device == device:
            return self
        given: Any = {one.name: getattr(self, one.name) for one in fields(cast(Any, self)) if one.init}
        return type(self)(**{name: one.to(device) if isinstance(one, Tensor) else one for name, one in given.items()})


def is_whole(layer: Any) -> bool:
    """Whether a layer was replaced with all that is in it; its masks are boolean, and None for plain causal masking."""
    return bool(getattr(layer, "is_whole", False))


def run_module(
    decoder: Any, place: int, x: Tensor, positions: Tensor, visible: Visible, cache: Any, axes: Tensor | None = None
) -> Tensor:
    """A decoder layer's own module: x[B T, K] at positions[B, T] -> [B T, K].

    cache: the KV cache, with transformers' interface; None for none. axes[3, B, T]: positions that differ by axis.
    """
    layer = layers_of(decoder)[place]
    attention, rows = LayerDescription(layer).attention, x.view(*positions.shape, -1)
    assert attention is not None
    seen = visible(attention.window)
    if seen is not None and implementation(attention.module.config) == "eager" and not is_whole(layer):
        seen = torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, torch.finfo(x.dtype).min)
    rotary, use_cache = rotary_on(getattr(decoder, "rotary_emb", None), x.device), cache is not None
    given = {"attention_mask": seen, "position_ids": positions, layer_argument(layer): cache, "use_cache": use_cache}
    if rotary is not None:
        kind = () if one_rope(rotary) else (attention.layer_type,)
        places = positions if not by_axes(rotary) else positions.expand(3, *positions.shape) if axes is None else axes
        given["position_embeddings"] = rotary(rows, places, *kind)
    made = layer(rows, **given)
    made = made[0] if isinstance(made, tuple) else made
    if not isinstance(made, Tensor) or made.shape != rows.shape:
        got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise KernelError(f"layer {place} gave {got} and not {list(rows.shape)}: look at its hooks")
    return made.reshape(x.shape)
