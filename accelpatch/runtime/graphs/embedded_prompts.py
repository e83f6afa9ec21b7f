"""Short prompts given as embeddings, as graphs: those of multimodal models, behind the outputs of a tower.

As short prompts of ids (prefill.py): one graph per bucket of lengths, captured at the second call, and shorter prompts
are padded at the end, where causal attention hides the padding from their tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import FOREIGN, KernelError
from accelpatch.fusion.cache_call import CacheCall, KeptCall
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.prefill import KEPT, bucket_of, captured_tokens

#: Most rows x length of one, as of int8 activations in prefill.py: rotary embedding by three axes is a dozen launches a
#: layer, so that launches take longer than the kernels of a small language model for longer prompts too.
TOKENS = 2048


class EmbeddedPrompt:
    """A prompt of `rows` texts of up to `length` tokens, without padding before them.

    like: embeddings, for their size, dtype and device. by_axes: whether positions differ by axis. layers: after how
    many of the first layers outputs of a tower are added.
    """

    def __init__(
        self, fused: FusedModel, rows: int, length: int, like: Tensor, by_axes: bool, layers: int, graph: GraphOf
    ):
        self._fused = fused
        with torch.inference_mode(False):
            self._embeds = torch.zeros(rows, length, like.shape[-1], dtype=like.dtype, device=like.device)
            self._positions = torch.zeros(rows, length, dtype=torch.int64, device=like.device)
            self._axes = torch.zeros(3, rows, length, dtype=torch.int64, device=like.device) if by_axes else None
            self._added = [torch.zeros_like(self._embeds) for _ in range(layers)]
            self._axis = None if fused.axes is None else fused.axes.to(like.device)
        self._capture: GraphOf | None = graph  # None where it failed: the program then runs uncaptured
        self._graph: Graph | None = None
        self._made: tuple[Tensor, list[Tensor]] | None = None

    def __call__(self, embeds: Tensor, call: CacheCall, shown: Tensor | None, added: Sequence[Tensor]) -> Tensor:
        """Normalised hidden states [B, L, K] after embeds[B, L, K]; keys and values go into the call's cache.

        shown, added: as in `multimodal_parts._first_layers`.
        """
        length = embeds.shape[1]
        self._embeds[:, :length].copy_(embeds)
        self._positions[:, :length].copy_(call.positions)
        if self._axes is not None and call.axes is not None:
            self._axes[:, :, :length].copy_(call.axes)
        for own, one in zip(self._added, added, strict=True):
            assert shown is not None
            own.zero_()[:, :length][shown.to(own.device)] = one.to(own.device, own.dtype)
        with torch.inference_mode(False), torch.no_grad():
            normal, kept = self._ran()
        if call.cache is not None:
            for place, new in enumerate(kept):
                call.cached(new[:, :, :, :length].clone(), place)
        return normal[:, :length].clone()

    def _ran(self) -> tuple[Tensor, list[Tensor]]:
        """What the program makes of its inputs, in tensors that the next call overwrites."""
        if self._made is not None and self._graph is None and self._capture is not None:
            try:
                self._graph = self._capture(self._run)
            except (*FOREIGN, KernelError):  # a graph cannot hold it; the program's own errors come below
                self._capture = None
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        assert self._made is not None
        return self._made

    def _run(self) -> None:
        fused = self._fused
        call = KeptCall(fused.decoder(), self._positions, None, None, 0, axes=self._axes, axis=self._axis)
        with weight_prefetch():
            x, pending = fused.positioned(self._embeds, self._positions), None
            for place, one in enumerate(self._added):
                x, pending = fused.run(x, call, places=[place])
                x = (x if pending is None else x + pending) + one.flatten(0, 1)
            normal = fused.normal(*fused.run(x, call, places=range(len(self._added), len(fused.layers))))
            self._made = normal.view(self._embeds.shape), call.kept


class EmbeddedPrompts:
    """The EmbeddedPrompts of a model, by rows, bucket, and what is given besides embeddings."""

    def __init__(self, fused: FusedModel, graph: GraphOf):
        self._fused, self._graph = fused, graph
        self._tokens = TOKENS if captured_tokens(fused) else 0
        self._captured: OrderedDict[tuple[Any, ...], EmbeddedPrompt] = OrderedDict()

    def of(self, embeds: Tensor, call: CacheCall, layers: int) -> EmbeddedPrompt | None:
        """The EmbeddedPrompt for a call; None where it is long or padded, continues a cache, or has tokens that see
        later ones."""
        fused, (rows, length) = self._fused, embeds.shape[:2]
        if call.mask is not None or call.masks is not None or call.past or fused.in_parts or fused.no_prompts:
            return None
        bucket = bucket_of(length)
        windows = [layer.attention.window for layer in fused.fused_layers if layer.attention.window]
        if bucket * rows > self._tokens or any(bucket > window for window in windows):
            return None
        key = rows, bucket, call.axes is not None, layers
        if key not in self._captured:
            made = EmbeddedPrompt(fused, rows, bucket, embeds, call.axes is not None, layers, self._graph)
            self._captured[key] = made
            while len(self._captured) > KEPT:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        return self._captured[key]
