"""The prompt of a call of generate() by fused layers, straight into the static cache of its captured step."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.hip.binding import settled_weights
from accelpatch.runtime.captured_batch import GraphOf
from accelpatch.runtime.captured_graph import Graph
from accelpatch.runtime.captured_step import CapturedStep

FUSED_PROMPT = "fused prefill"
CAPTURED_TOKENS = 512  # rows times length; from there on the device takes longer than the host's launches
BUCKET = 64  # a captured prompt is a multiple of it, or half of it
KEPT = 4  # captured lengths of a step


def why_not(step: CapturedStep, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Why the model's own forward must take the prompt ids[B, L]; None where fused layers may."""
    cache, mask, positions = kwargs["past_key_values"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    if reason := step.no_prompts:
        return reason
    if cache.get_seq_length():
        return "the cache holds tokens already"
    if getattr(config, "prefill_chunk_size", None) is not None:
        return "prefill in chunks was asked for"
    if positions is None or positions.shape != ids.shape or (mask is not None and mask.shape != ids.shape):
        return "positions or an attention mask of another form than the ids"
    return None


class ShortPrompt:
    """A prompt of up to `length` tokens without padding into the step's cache, as one graph from the second time on.

    What stands behind a shorter one is seen by none of its tokens, and overwritten before a later one sees it. The
    first time runs the same program over the same shapes, so that a call that comes again gives the same bits.
    """

    def __init__(self, step: CapturedStep, length: int, graph: GraphOf):
        batch = step.batch
        whole = {"dtype": torch.int64, "device": batch.device}
        self._ids, self._positions = (torch.zeros(batch.rows, length, **whole) for _ in range(2))  # type: ignore[call-overload]
        self._last = torch.zeros(1, **whole)  # type: ignore[call-overload]
        self._logits = torch.zeros_like(batch.logits)

        def program() -> None:
            with settled_weights():
                self._logits.copy_(step.prompt(self._ids, self._positions, None, self._last))

        self._program, self._capture = program, graph
        self._graph: Graph | None = None
        self._ran = False

    @property
    def captured(self) -> bool:
        """Whether it is a graph by now."""
        return self._graph is not None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] float32 after ids[B, L]."""
        length = ids.shape[1]
        self._ids[:, :length].copy_(ids)
        self._positions[:, :length].copy_(positions)
        self._last.fill_(length - 1)
        if self._ran and self._graph is None:
            self._graph = self._capture(self._program)
        if self._graph is None:
            self._program()
        else:
            self._graph.replay()
        self._ran = True
        return self._logits.clone()


class Prompts:
    """The short prompts of one step, by length in buckets."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, ShortPrompt] = OrderedDict()

    def of(self, step: CapturedStep, length: int, graph: GraphOf) -> ShortPrompt | None:
        """The one for so many tokens; None where they are too many."""
        bucket = BUCKET // 2 if length <= BUCKET // 2 else -(-length // BUCKET) * BUCKET
        if bucket * step.batch.rows > CAPTURED_TOKENS or bucket > step.capacity:
            return None
        if bucket not in self._held:
            self._held[bucket] = ShortPrompt(step, bucket, graph)
            while len(self._held) > KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end(bucket)
        return self._held[bucket]


@torch.no_grad()
def fused_prompt(step: CapturedStep, ids: Tensor, kwargs: dict[str, Any], graph: GraphOf) -> Tensor:
    """Logits [B, V] float32 after ids[B, L]; keys and values lie in the step's cache, the call's own is made ready."""
    mask, cache, positions = kwargs.get("attention_mask"), kwargs["past_key_values"], kwargs["position_ids"]
    if mask is not None and bool(mask.all()):
        mask = None
    if step.prompts is None:
        step.prompts = Prompts()
    short = step.prompts.of(step, ids.shape[1], graph) if mask is None else None
    logits = step.prompt(ids, positions.contiguous(), mask).float() if short is None else short(ids, positions)
    for place, held in enumerate(step.cache.layers):
        cache.update(held.keys[:, :, :0], held.values[:, :, :0], place)
    return logits
