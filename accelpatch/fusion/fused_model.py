"""A model's fused layers one after the other, from token ids to logits; layers that are not fused run as modules.

The last norm is part of the head's launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.cached import Cached, cached_by
from accelpatch.fusion.call import Call
from accelpatch.fusion.decoder import Positions, layers_of
from accelpatch.fusion.fused_layer import FusedLayer, PromptCall, StepCall
from accelpatch.fusion.signals import SentinelBuffers
from accelpatch.fusion.spread import ByModule, Sentinels, Spread, is_offloaded
from accelpatch.kernels import regions
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS, MAX_ROWS
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.kernels.triton.launch import on_device

FUSED = "fused layers"
CHUNK = 8192  # tokens of a part of a prompt: enough to occupy a GPU


@dataclass(frozen=True, eq=False)
class FusedModel:
    """All layers, the embedding, the last norm and the head.

    decoder: the module that holds the layers' modules. dtype: of activations, keys and values. layers: None for one
    that is not fused. unfused: place of such a layer -> why. softcap: of the logits, 0 for none. embedding_multiplier,
    logit_divisor: of embeddings and logits. most: most rows of a step. positions: learned embeddings of positions, or
    None. by_length: whether the decoder's rotary embedding writes its frequencies, which the layers read, by the
    length. both_ways: whether tokens of a prompt see those behind them. axes: of axes_of in rotary.py. whole: places of
    layers that run as modules since they were replaced with all that is in them. spread: the devices of the parts; None
    for one device. across: gathers the logits of the ranks of a tensor-parallel job.
    """

    decoder: weakref.ref[Any]
    dtype: torch.dtype
    embedding: nn.Module
    layers: tuple[FusedLayer | None, ...]
    unfused: Mapping[int, str]
    norm: FusedNorm | ByModule
    head: FusedLinear | AdaptedLinear | ByModule
    sentinels: SentinelBuffers | Sentinels
    softcap: float = 0.0
    embedding_multiplier: float = 1.0
    logit_divisor: float = 1.0
    most: int = MAX_ROWS
    positions: Positions | None = None
    by_length: bool = False
    both_ways: bool = False
    axes: Tensor | None = None
    whole: frozenset[int] = frozenset()
    spread: Spread | None = None
    across: Callable[[Tensor], Tensor] | None = None

    @property
    def in_parts(self) -> bool:
        """Whether no single graph holds a step: parts lie on several devices, or outside of the layers offloaded."""
        loose = isinstance(self.head, ByModule) or isinstance(self.norm, ByModule) or is_offloaded(self.embedding)
        return self.spread is not None or loose

    @property
    def fused_layers(self) -> list[FusedLayer]:
        """The layers that are fused."""
        return [layer for layer in self.layers if layer is not None]

    @property
    def places(self) -> set[int]:
        """The places of the layers that are fused."""
        return {place for place, layer in enumerate(self.layers) if layer is not None}

    @cached_property
    def cached(self) -> tuple[Cached, ...]:
        """What each layer caches."""
        sizes = [None if one is None else (one.attention.kv_heads, one.attention.size) for one in self.layers]
        layers = zip(layers_of(self.decoder()), sizes, strict=True)
        return tuple(cached_by(layer, self.dtype, known) for layer, known in layers)

    def without(self, failed: Mapping[int, str]) -> FusedModel:
        """This model with more layers that run as modules: place -> why."""
        layers = tuple(None if place in failed else layer for place, layer in enumerate(self.layers))
        return replace(self, layers=layers, unfused={**self.unfused, **failed})

    def first(self, count: int) -> FusedModel:
        """The first layers of this model, with its last norm and head: what an early exit computes."""
        return replace(self, layers=self.layers[:count])

    def exceptions_with(self, watched: Collection[int]) -> str:
        """For a report: the layers that run as modules, in this call those with hooks, `watched`, too, and why."""
        reasons = {**dict.fromkeys(watched, "a hook inside"), **self.unfused}
        return f", but modules in layers {sorted(reasons)}: {reasons[min(reasons)]}" if reasons else ""

    def __call__(self, tokens: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits [B T, V] after tokens[B] or [B, T], cached from `slot` on; positions[B, T]; mask: the cache's."""
        x = self.begin(tokens, positions)
        return self.logits(*self.run(x, StepCall(self.decoder(), cache, positions, slot, mask)))

    @regions.within("embedding")
    def begin(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Begin a step of tokens[B] or [B, T] at positions[B, T]: the first layer's input [B T, K]."""
        here = self.sentinels if self.spread is None else self.sentinels.on(self.spread.first)
        here.reset(tokens.numel())
        decoder: Any = self.decoder()
        x = self.embedded(tokens, positions, tokens.dim() > 1)
        if self.by_length:
            decoder.rotary_emb(x, positions)
        return x

    @regions.within("embedding")
    def embedded(self, ids: Tensor, positions: Tensor, drafts: bool = False) -> Tensor:
        """Embeddings [M, K] of the M ids at so many positions, the first layer's input."""
        if self.spread is not None:
            ids, positions = ids.to(self.spread.first), positions.to(self.spread.first)
        return self.positioned(self.embedding(ids.reshape(-1)), positions, drafts)

    def positioned(self, embeddings: Tensor, positions: Tensor, drafts: bool = False) -> Tensor:
        """The first layer's input [M, K] of embeddings [..., K] at so many positions."""
        x = embeddings.reshape(-1, embeddings.shape[-1])
        x = x if self.embedding_multiplier == 1.0 else x * self.embedding_multiplier
        return x if self.positions is None else x + self.positions(positions.reshape(-1), drafts)

    def prompt(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, last: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, V] after ids[B, L], which fill the first slots of an empty cache.

        mask[B, L]: None for no padding. last[1]: index of the token whose logits are wanted; None: the last one, and
        the prompt runs in parts of `chunk` tokens a row (default: so many that all rows together have CHUNK), so that
        the memory of activations does not grow with its length.
        """
        size = ids.shape[1] if last is not None else chunk or max(1, CHUNK // len(ids))
        rows: list[Tensor] = []
        for start in range(0, ids.shape[1], size):
            part = slice(start, start + size)
            seen = None if mask is None else mask[:, : part.stop]
            call = PromptCall(self.decoder(), cache, positions[:, part].contiguous(), seen, start)
            x = self.embedded(ids[:, part], call.positions)
            rows = [one.view(*call.positions.shape, -1) for one in self.run(x, call) if one is not None]
        return self.logits(
            *(one[:, -1].contiguous() if last is None else one.index_select(1, last)[:, 0] for one in rows)
        )

    def run(
        self, x: Tensor, call: Call, watched: Collection[int] = (), seen: list[Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The layers on the rows x[M, K]: (x, rest), the rest to be added by the next norm.

        watched: places of layers that run as modules besides those not fused. seen: receives each layer's input.
        places: the layers to run; default: all.
        """
        places = range(len(self.layers)) if places is None else places
        if self.spread is None:
            return self._run(x, None, call, watched, seen, places)
        pending: Tensor | None = None
        for device, near in self.spread.stretches(places):
            x, pending = x.to(device), None if pending is None else pending.to(device)
            with on_device(x):
                x, pending = self._run(x, pending, call.on(device), watched, seen, near)
        return x, pending

    def _run(
        self, x: Tensor, pending: Tensor | None, call: Call, watched: Collection[int], seen: list[Tensor] | None,
        places: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        for place in places:
            layer = None if place in watched else self.layers[place]
            with regions.layer(place):
                if pending is not None and (layer is None or seen is not None):
                    x, pending = x + pending, None
                if seen is not None:
                    seen.append(x)
                if layer is None:
                    x = call.by_module(x, place)
                else:
                    x, pending = call.form(layer)(x, pending, call, place)
        return x, pending

    def forget(self) -> None:
        """Reset the flags that an interrupted step left set."""
        for layer in self.fused_layers:
            for one in (layer.qkv, layer.gate_up):
                if isinstance(one, FusedLinear) and one.producer is not None:
                    one.producer.number.zero_()

    @property
    def int8_activations(self) -> bool:
        """Whether linear layers take int8 activations: a prompt then takes the device half the time of floats."""
        if self.whole:
            return True
        first = [layer.gate_up for layer in self.fused_layers[:1]]
        return any(isinstance(one, FusedLinear) and isinstance(one.weight, W8A8Rows) for one in first)

    @property
    def no_prompts(self) -> str | None:
        """Why `prompt` would not compute what the modules do; None where it does."""
        if self.by_length:  # padding behind a short prompt has positions too
            return "rotary frequencies that change with the length"
        return "tokens of a prompt see those behind them" if self.both_ways else None

    def normal(self, x: Tensor, pending: Tensor | None) -> Tensor:
        """Normalised hidden states [M, K] of the rows x + pending, the head's input."""
        x, pending = self._at_the_head(x), None if pending is None else self._at_the_head(pending)
        return self.norm.of_sum(x, pending)[0]

    def logits_of(self, normal: Tensor) -> Tensor:
        """Logits [M, V] of normalised hidden states [M, K]."""
        with on_device(normal):
            return self._capped(self.head.large_m(normal))

    def _at_the_head(self, x: Tensor) -> Tensor:
        return x if self.spread is None else x.to(self.spread.last)

    @regions.within("head")
    def logits(self, x: Tensor, pending: Tensor | None = None) -> Tensor:
        """Logits [M, V] of the rows x + pending, what `run` returns."""
        x = self._at_the_head(x)
        if pending is None and x.shape[0] <= MAX_GEMV_ROWS and not isinstance(self.norm, ByModule):
            with on_device(x):
                return self._capped(self.head(x, self.norm))
        return self.logits_of(self.normal(x, pending))

    def _capped(self, logits: Tensor) -> Tensor:
        logits = logits if self.across is None else self.across(logits)
        logits = logits if self.logit_divisor == 1.0 else logits / self.logit_divisor
        return (logits / self.softcap).tanh() * self.softcap if self.softcap else logits
