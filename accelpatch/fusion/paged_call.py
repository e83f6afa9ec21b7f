"""A model call over the pages of continuous batching: the new tokens of several texts, one text after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.fusion.call import Movable
from accelpatch.fusion.decoder import layers_of
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.rotary import one_rope
from accelpatch.fusion.spread import rotary_on
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.ops.attention.paged_attention import paged_attention_
from accelpatch.kernels.ops.attention.prompt_attention import rotate_
from accelpatch.modules.paged_attention import no_mask
from accelpatch.modules.paged_cache import PagedCache


@dataclass(eq=False)
class PagedCall(Movable):
    """positions[1, T] int64 of the new tokens of all texts; a captured graph may hold the call."""

    decoder: Any
    cache: PagedCache
    positions: Tensor

    def form(self, layer: Any) -> Any:
        """As in Call."""
        return layer.without_signals

    def attend(self, qkv: Tensor, layer: Any, place: int) -> Tensor:
        """As in Call; qkv is overwritten."""
        shape: AttentionShape = layer.attention
        tokens, pages = len(qkv), self.cache.of(place)
        new = qkv.new_empty(2, 1, shape.kv_heads, tokens, shape.size)
        rotate_(qkv, self.positions, new[0], new[1], shape)
        q = qkv.view(tokens, -1, shape.size)[:, : shape.heads]
        k, v = new[0, 0].transpose(0, 1), new[1, 0].transpose(0, 1)
        y = paged_attention_(
            q, k, v, pages.keys, pages.values, pages.rows, shape.scaling, shape.window, shape.softcap, shape.sinks
        )  # fmt: skip
        return y.view(tokens, -1)

    def by_module(self, x: Tensor, place: int) -> Tensor:
        """As in Call."""
        layer = layers_of(self.decoder)[place]
        attention, rows = LayerDescription(layer).attention, x[None]
        assert attention is not None
        given = {"attention_mask": no_mask(x), "position_ids": self.positions, "cache": self.cache, "use_cache": False}
        rotary = rotary_on(getattr(self.decoder, "rotary_emb", None), x.device)
        if rotary is not None:
            kind = () if one_rope(rotary) else (attention.layer_type,)
            given["position_embeddings"] = rotary(rows, self.positions, *kind)
        made = layer(rows, **given)
        made = made[0] if isinstance(made, tuple) else made
        if not isinstance(made, Tensor) or made.shape != rows.shape:
            raise KernelError(f"layer {place} gave no states of {list(rows.shape)}: look at its hooks")
        return made[0]
