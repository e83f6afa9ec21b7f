"""The prompt of a call by fused layers: into a step's static cache, and by graphs where it is short.

Short are prompts whose kernels the host takes longer to launch than the device to run them. There is one graph per
bucket of lengths.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import FOREIGN, KernelError
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.decoder import layers_of
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.rotary import of_one_axis
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.models.multimodal import is_multimodal, shows_media
from accelpatch.runtime.graphs.capture import Graph, GraphOf
from accelpatch.runtime.graphs.step import CapturedStep

FUSED_PROMPT = "fused prefill"
CAPTURED_TOKENS = 512  # most rows x length; larger prompts are not limited by launch overhead
INT8_TOKENS = 2048  # the same with int8 activations
BUCKET = 64  # captured lengths are multiples of this, or one of SHORTER
SHORTER = (1, 8, 32)
KEPT = 4  # captured prompts that are kept

#: ids[B, L], positions[B, L] int64, last[1] int64 (the place of the last token that is no padding) -> what it computes
Program = Callable[[Tensor, Tensor, Tensor], Any]


class ShortPrompt:
    """A prompt of up to `length` tokens without padding; captured at its second call.

    Shorter prompts are padded at the end, where causal attention hides the padding from their tokens. The first call
    runs the same program over the same shapes, so that repeated calls give the same bits.
    """

    def __init__(self, rows: int, length: int, device: torch.device, program: Program, graph: GraphOf):
        with torch.inference_mode(False):
            self._ids, self._positions = torch.zeros(2, rows, length, dtype=torch.int64, device=device)
            self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._program = program
        self._capture: GraphOf | None = graph  # None where it failed: the program then runs uncaptured
        self._graph: Graph | None = None
        self._made: Any = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Any:
        """The program's outputs for ids[B, L], in tensors that the next call overwrites."""
        length = ids.shape[1]
        self._ids[:, :length].copy_(ids)
        self._positions[:, :length].copy_(positions)
        self._last.fill_(length - 1)
        with torch.inference_mode(False), torch.no_grad():
            if self._made is None:
                self._run()
                return self._made
            if self._graph is None and self._capture is not None:
                try:
                    self._graph = self._capture(self._run)
                except (*FOREIGN, KernelError):  # a graph cannot hold it; the program's own errors come below
                    self._capture = None
            if self._graph is None:
                self._run()
            else:
                self._graph.replay()
            return self._made

    def _run(self) -> None:
        with weight_prefetch():
            self._made = self._program(self._ids, self._positions, self._last)


def bucket_of(length: int) -> int:
    """The length that prompts of `length` tokens are captured with."""
    return next((one for one in SHORTER if length <= one), -(-length // BUCKET) * BUCKET)


def captured_tokens(fused: FusedModel) -> int:
    """The most rows x length of a prompt that is captured; none where a layer runs code of others, which may look at
    the padding, or ask the cache for its length."""
    layers = layers_of(fused.decoder())
    if fused.in_parts or any(LayerDescription(layers[place]).other_code for place in fused.unfused):
        return 0
    return INT8_TOKENS if fused.int8_activations else CAPTURED_TOKENS


class Prompts:
    """The ShortPrompts of one program, by rows and bucket. tokens: the most rows x length of one."""

    def __init__(self, program: Program, graph: GraphOf, tokens: int = CAPTURED_TOKENS):
        self._program, self._graph, self._tokens = program, graph, tokens
        self._captured: OrderedDict[tuple[int, int], ShortPrompt] = OrderedDict()

    def of(self, ids: Tensor, most: int | None = None) -> ShortPrompt | None:
        """The ShortPrompt for ids[B, L]; None where there are too many tokens, or the bucket is larger than `most`."""
        rows, length = ids.shape
        bucket = bucket_of(length)
        if bucket * rows > self._tokens or (most is not None and bucket > most):
            return None
        key = rows, bucket
        if key not in self._captured:
            self._captured[key] = ShortPrompt(*key, ids.device, self._program, self._graph)
            while len(self._captured) > KEPT:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        return self._captured[key]


def why_not(step: CapturedStep, ids: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Why the model's own forward must run the prompt ids[B, L]; None where fused layers can."""
    cache, mask, positions = kwargs[CACHE], kwargs.get("attention_mask"), kwargs.get("position_ids")
    positions = None if positions is None else of_one_axis(positions)
    if step.fused is None or step.fused.no_prompts:
        return "no fused layers" if step.fused is None else step.fused.no_prompts
    if cache.get_seq_length():
        return "the cache holds tokens already"
    if kwargs.get("inputs_embeds") is not None:
        return "embeddings in place of ids"
    if kwargs.get("output_hidden_states"):
        return "drafts are made from its hidden states"
    if positions is None or positions.shape != ids.shape or (mask is not None and mask.shape != ids.shape):
        return "positions or an attention mask of another shape than the ids"
    if shows_media(kwargs):
        return "pictures or sounds"
    model = step.model
    if is_multimodal(model) and bool((ids >= model.get_input_embeddings().num_embeddings).any()):
        return "tokens of pictures without pictures"  # whose ids the model's own forward replaces
    return None


@torch.no_grad()
def prefill(step: CapturedStep, ids: Tensor, kwargs: dict[str, Any], graph: GraphOf, chunk: int | None) -> Tensor:
    """Logits [B, V] float32 after ids[B, L], cached in the step's cache; the call's own cache is initialised.

    chunk: as of FusedModel.prompt.
    """
    mask, cache, positions = kwargs.get("attention_mask"), kwargs[CACHE], of_one_axis(kwargs["position_ids"])
    assert positions is not None
    if mask is not None and bool(mask.all()):
        mask = None
    fused = step.fused
    assert fused is not None
    if step.prompts is None:
        # padding after a short prompt is overwritten in the cache before a later token attends to it
        own: Any = weakref.ref(step)  # which holds its prompts
        program = lambda ids, positions, last: fused.prompt(ids, positions, None, own().cache, last)  # noqa: E731
        step.prompts = Prompts(program, graph, captured_tokens(fused))
    short = step.prompts.of(ids, step.capacity) if mask is None and chunk is None else None
    whole = positions.contiguous()
    logits = fused.prompt(ids, whole, mask, step.cache, chunk=chunk) if short is None else short(ids, whole)
    logits = logits.to(torch.float32, copy=True)
    for place, layer in enumerate(step.cache.layers):
        cache.update(layer.keys[:, :, :0], layer.values[:, :, :0], place)
    return logits
